"""``python -m benchmarks.decentralised.joining``: the joiner, started by its host; see `guest`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.decentralised.guest import Voice
from benchmarks.decentralised.plan import Job

__all__: list[str] = []

_NICENESS = 10
"""It stands for another machine, so it stands back on this one."""


def main(arguments: Sequence[str]) -> None:
    os.nice(_NICENESS)
    given = json.loads(arguments[0])
    voice, job = Voice(), Job.from_record(given["job"])
    import torch  # the time all this takes is told, too

    from benchmarks.decentralised.peers import make_peer
    from benchmarks.decentralised.training import NUM_FRAGMENTS, Trainer, work_of
    from diloco.events import Event, RoundCommitted
    from diloco.transport.base import Fetching
    from diloco.transport.peers.connected import join

    torch.set_num_threads(1)
    voice.say("imported")
    connected = make_peer(job, given["number"], given["address"], given["known"])
    transport = connected.transport
    voice.say("introduced")

    fetched = {"bytes": 0, "fetches": 0, "seconds": 0.0}
    fetch, fetch_in_background = transport.fetch, transport.fetch_in_background

    def count(state: Mapping[str, Any], began_s: float) -> None:
        fetched["bytes"] += sum(values.nbytes for values in (state["global_params"], *state["slots"].values()))
        fetched["fetches"] += 1
        fetched["seconds"] += time.monotonic() - began_s

    def counted(fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        began_s = time.monotonic()
        state = fetch(fragment, donors, expected_bytes)
        count(state, began_s)
        return state

    def counted_beside(fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Fetching:
        began_s = time.monotonic()
        fetching = fetch_in_background(fragment, donors, expected_bytes)
        threading.Thread(target=lambda: count(fetching.result(), began_s), daemon=True).start()
        return fetching

    transport.fetch = counted  # type: ignore[method-assign]  # counts
    transport.fetch_in_background = counted_beside  # type: ignore[method-assign]  # counts
    contributed: set[int] = set()

    def note(event: Event) -> None:
        if isinstance(event, RoundCommitted) and transport.replica in event.contributors:
            if not contributed:
                voice.say("contributed", fetched_then=dict(fetched))
            contributed.add(event.fragment)

    trainer = Trainer(work_of(job.values), transport, computes=False, on_event=note)
    voice.say("built")
    trainer.diloco.take_over(transport.view.members)
    voice.say("has state", fetched_first=dict(fetched))
    trainer.diloco.steps = join(connected, job.timeout_s)
    voice.say("member", members=list(transport.view.members))
    hung_up = threading.Event()

    def listen() -> None:
        voice.hear()
        hung_up.set()

    threading.Thread(target=listen, daemon=True).start()
    while not hung_up.is_set():
        everywhere = len(contributed) == NUM_FRAGMENTS
        trainer.step()
        if len(contributed) == NUM_FRAGMENTS and not everywhere:
            voice.say("contributed everywhere", fetched=dict(fetched))
    transport.leave()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
