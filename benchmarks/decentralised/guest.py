"""A peer that joins and leaves: `Guest` is the host's handle, ``python -m benchmarks.decentralised.guest`` the peer.

The peer reports events as lines of JSON with the time of each, and receives commands of one word.
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

__all__ = ["Guest", "HostConnection", "first_round"]

_TINY = 256


class Guest:
    """The host's handle of the peer.

    Args:
        in_node: the beginning of a command that runs in the peer's node; empty: in the host's.

    Attributes:
        events: the time of each event on the clock `time.monotonic`, and the values reported with it.
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
        self.events: dict[str, Any] = {"number": number, "started": time.monotonic()}
        self._limit_s = job.timeout_s
        self._buffered = b""
        self._process = subprocess.Popen(
            [*in_node, sys.executable, "-m", module, json.dumps(given)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait_for(self, event: str) -> None:
        """Wait until the peer has reported ``event``.

        Raises:
            TimeoutError: if that takes longer than the job's time-out.
            RuntimeError: if the peer ends first.
        """
        deadline_s = time.monotonic() + self._limit_s
        while event not in self.events:
            if not self.receive(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"The guest did not report {event!r} in time. It reported {self.events}")

    def receive(self, within_s: float) -> bool:
        """Record the peer's next events; return False if there are none within ``within_s``.

        Raises:
            RuntimeError: if the peer has ended.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within_s)[0]:
            return False
        chunk = os.read(self._process.stdout.fileno(), 65536)
        if not chunk:
            raise RuntimeError(f"The guest has ended. It reported {self.events}")
        *lines, self._buffered = (self._buffered + chunk).split(b"\n")
        for line in lines:
            self.events |= json.loads(line)
        return True

    def command(self, word: str) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), word.encode() + b"\n")

    def kill(self) -> None:
        """Kill the peer with SIGKILL."""
        self.events["killed"] = time.monotonic()
        self._process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Tell the peer to end, and kill it if it does not."""
        with contextlib.suppress(BrokenPipeError):
            self.command("end")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class HostConnection:
    """The peer's connection to its host. Whatever libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def report(self, event: str, **more: Any) -> None:
        """Report that ``event`` happens now."""
        line = json.dumps({event: time.monotonic(), **more})
        print(line, file=sys.stderr, flush=True)
        self._out.write(line + "\n")
        self._out.flush()

    def receive(self) -> str:
        """Return the next command; "end" if the host has ended."""
        return sys.stdin.readline().strip() or "end"


def first_round(transport: Any, from_step: int) -> None:
    """Run a round of a few values among the members of the current view, at its first step."""
    from diloco.algorithm import Contribution, RoundId, make_codec
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
    host, job = HostConnection(), Job.from_record(given["job"])

    from benchmarks.decentralised.peers import become_member, make_peer  # the time of this import is reported, too

    host.report("imported")
    connected = make_peer(job, given["number"], given["address"], given["known"])
    host.report("introduced")
    transport = become_member(connected, job.timeout_s)
    host.report("member", members=list(transport.view.members))
    first_round(transport, transport.step + 1)
    host.report("round")
    while (word := host.receive()) != "end":
        if word == "leave":
            host.report("leaving")
            transport.leave()
            host.report("left")
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
