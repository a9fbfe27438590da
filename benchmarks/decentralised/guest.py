"""A peer that comes and goes: `Guest` is its host's handle, and ``python -m benchmarks.decentralised.guest`` the peer.

It says what happens to it, a line of JSON each with the clock's time, and hears one word at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from benchmarks.decentralised.plan import Job

__all__ = ["Guest", "Voice", "first_round"]

_TINY = 256


class Guest:
    """The peer as its host sees it.

    Args:
        in_node: what a command begins with that is to run where the peer is; empty: where its host is.

    Attributes:
        said: what happened -> when on the clock `time.monotonic`, and what it said beside.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        address: str,
        known: Sequence[str],
        module: str = "benchmarks.decentralised.guest",
        in_node: Sequence[str] = (),
    ) -> None:
        given = {"job": job.to_record(), "number": number, "address": address, "known": list(known)}
        self.said: dict[str, Any] = {"number": number, "started": time.monotonic()}
        self._limit_s = job.timeout_s
        self._buffered = b""
        self._process = subprocess.Popen(
            [*in_node, sys.executable, "-m", module, json.dumps(given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait_for(self, event: str) -> None:
        """Until it has said that ``event`` has happened.

        Raises:
            TimeoutError: if that takes too long.
            RuntimeError: if it ends before.
        """
        deadline_s = time.monotonic() + self._limit_s
        while event not in self.said:
            if not self.hear(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"the peer that comes and goes did not say {event!r}; it said {self.said}")

    def hear(self, within_s: float) -> bool:
        """Take in what it says next; whether it says anything so soon.

        Raises:
            RuntimeError: if it has ended.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            return False
        chunk = os.read(self._process.stdout.fileno(), 65536)
        if not chunk:
            raise RuntimeError(f"the peer that comes and goes has ended; it said {self.said}")
        *lines, self._buffered = (self._buffered + chunk).split(b"\n")
        for line in lines:
            self.said |= json.loads(line)
        return True

    def ask(self, word: str) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), word.encode() + b"\n")

    def kill(self) -> None:
        """Without a word to anybody."""
        self.said["killed"] = time.monotonic()
        self._process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Let it end, or end it."""
        with contextlib.suppress(BrokenPipeError):
            self.ask("end")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Voice:
    """The guest's side of the conversation. What libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, event: str, **more: Any) -> None:
        """``event`` happens now."""
        line = json.dumps({event: time.monotonic(), **more})
        print(line, file=sys.stderr, flush=True)
        self._out.write(line + "\n")
        self._out.flush()

    def hear(self) -> str:
        """The next word; "end" if the host has gone."""
        return sys.stdin.readline().strip() or "end"


def first_round(transport: Any, from_step: int) -> None:
    """A round of a few values among the members of the present view, at its first step."""
    from diloco.algorithm.averaging import Contribution, RoundId
    from diloco.algorithm.codec import make_codec
    from diloco.errors import TransportError

    import torch  # isort: skip

    while transport.step < from_step:
        transport.tick()
    codec = make_codec("float32")
    contribution = Contribution(
        round=RoundId(0, transport.view.id),
        replica=transport.replica,
        codec=codec,
        numel=_TINY,
        payload=codec.encode(torch.ones(_TINY)),
    )
    with contextlib.suppress(TransportError):
        transport.average(contribution).wait()


def main(arguments: Sequence[str]) -> None:
    given = json.loads(arguments[0])
    voice, job = Voice(), Job.from_record(given["job"])

    from benchmarks.decentralised.peers import become_member, make_peer  # the time this takes is told, too

    voice.say("imported")
    connected = make_peer(job, given["number"], given["address"], given["known"])
    voice.say("introduced")
    transport = become_member(connected, job.timeout_s)
    voice.say("member", members=list(transport.view.members))
    first_round(transport, transport.step + 1)
    voice.say("round")
    while (word := voice.hear()) != "end":
        if word == "leave":
            voice.say("leaving")
            transport.leave()
            voice.say("left")
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
