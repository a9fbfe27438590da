"""``python -m benchmarks.decentralised.joining``: a joiner that trains, started by its host as in `guest`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.decentralised.guest import HostConnection
from benchmarks.decentralised.plan import Job

__all__: list[str] = []

_NICENESS = 10
"""It stands for another machine, so it must not take the CPU from the members."""


def main(arguments: Sequence[str]) -> None:
    os.nice(_NICENESS)
    given = json.loads(arguments[0])
    host, job = HostConnection(), Job.from_record(given["job"])
    import torch  # the time of these imports is reported, too

    from benchmarks.decentralised.peers import make_peer
    from benchmarks.decentralised.training import NUM_FRAGMENTS, Trainer, work_of
    from diloco.events import Event, RoundCommitted
    from diloco.transport import Fetching, join

    torch.set_num_threads(1)
    host.report("imported")
    connected = make_peer(job, given["number"], given["address"], given["known"])
    transport = connected.transport
    host.report("introduced")

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

    def counted_in_background(fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Fetching:
        began_s = time.monotonic()
        fetching = fetch_in_background(fragment, donors, expected_bytes)
        threading.Thread(target=lambda: count(fetching.result(), began_s), daemon=True).start()
        return fetching

    transport.fetch = counted  # type: ignore[method-assign]  # to count the bytes
    transport.fetch_in_background = counted_in_background  # type: ignore[method-assign]  # the same
    contributed: set[int] = set()

    def note(event: Event) -> None:
        if isinstance(event, RoundCommitted) and transport.replica in event.contributors:
            if not contributed:
                host.report("contributed", fetched_then=dict(fetched))
            contributed.add(event.fragment)

    trainer = Trainer(work_of(job.values), transport, computes=False, on_event=note)
    host.report("built")
    trainer.diloco.take_over(transport.view.members)
    host.report("has state", fetched_first=dict(fetched))
    trainer.diloco.steps = join(connected, job.timeout_s)
    host.report("member", members=list(transport.view.members))
    ended = threading.Event()

    def listen() -> None:
        host.receive()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    while not ended.is_set():
        everywhere = len(contributed) == NUM_FRAGMENTS
        trainer.step()
        if len(contributed) == NUM_FRAGMENTS and not everywhere:
            host.report("contributed everywhere", fetched=dict(fetched))
    transport.leave()
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
