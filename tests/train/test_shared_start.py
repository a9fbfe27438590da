"""Replicas that lose the others in the shared start of a run end with the same bits."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from diloco.data import build_corpus
from diloco.events import Event, Lost, RoundCommitted, ViewChanged
from diloco.model import with_vocabulary
from diloco.protocol import Rules
from diloco.train import PeerFleet, Session, follow_views
from diloco.transport import Place, TcpStreams
from tests.runs import settings_of
from tests.transport.wires import QUICK, at_once, rendezvous

LIMIT_S = 60.0
"""A generous limit, for busy machines."""
RULES = Rules(**QUICK | {"continue_without_lost": True, "together": False, "raise_on_loss": False})


class Peer:
    """One replica and its thread, which trains until all replicas are asked to end."""

    def __init__(self, place: Place) -> None:
        self.fleet = PeerFleet(place, RULES)
        self.events: list[Event] = []
        self.digest = ""
        self.asked = threading.Event()
        self._changed = threading.Condition()

    def start(self, make: Callable[..., Session]) -> None:
        """Create the session and train. NumPy crashes if one thread swaps its generator while another reads it."""
        self.session = make(self.fleet, torch.device("cpu"), self._note)
        for replica in self.session.replicas:
            replica.random_state = mock.MagicMock()
        self.session.open_to_joiners()
        self.thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        last, stop = None, mock.MagicMock(signal=None, interrupting=nullcontext)
        try:
            while last is None or self.session.totals.steps < last:
                follow_views(self.session, stop, self._note)
                self.session.step()
                last = last or self.fleet.stop_step(self.session.totals.steps, wanted=self.asked.is_set())
            self.digest = self.session.global_digest()
            self.fleet.finish(done=False)
        finally:
            self.fleet.close()

    def _note(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, fits: Callable[[Event], bool]) -> None:
        """Wait for an event that fits."""
        with self._changed:
            came = self._changed.wait_for(lambda: any(map(fits, self.events)), LIMIT_S)
            assert came, f"not in {self.events[-9:]}"

    def give_up_others(self, at_once: threading.Barrier) -> None:
        """Lose all other replicas at the moment at which they lose this one."""
        connections = self.fleet.transport.connections

        def drop_all() -> None:
            at_once.wait(LIMIT_S)
            connections.drop(dict.fromkeys(connections.peers.values(), "it is silent"), silent=True)

        connections.post(drop_all)


def looks(event: Event) -> bool:
    return isinstance(event, Lost)


def committed_by_all(event: Event, fragment: int) -> bool:
    """Return whether a round of a fragment was committed; those of gradients are rounds of fragment -1."""
    return isinstance(event, RoundCommitted) and event.fragment == fragment and event.contributors == (0, 1, 2)


def test_all_who_lose_each_other_in_the_shared_start_end_it_and_go_on_together(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The founder trains only after others have joined, because they could otherwise found another view."""
    settings = settings_of(data, "--replicas 3 --steps 100000 --data-parallel-steps 100000")
    corpus = build_corpus(settings.data)
    settings = replace(settings, model=with_vocabulary(settings.model, corpus.tokenizer.vocab_size))
    with rendezvous(3) as address:
        places = [Place(replica=m, num_replicas=3, rendezvous=address, join_window_s=1.0) for m in range(3)]
        peers = at_once([lambda place=place: Peer(place) for place in places])
    for each in peers:
        each.start(lambda *given: Session(settings, corpus, *given))
    for each in peers:
        each.thread.start()
    with monkeypatch.context() as cut:
        cut.setattr(TcpStreams, "open", mock.AsyncMock(side_effect=ConnectionRefusedError("cut off")))
        barrier = threading.Barrier(3)
        for each in peers:
            each.give_up_others(barrier)
        for each in peers:
            each.wait_for(looks)
    for fragment in (0, 1):  # the state of each has arrived everywhere
        peers[0].wait_for(lambda event, fragment=fragment: committed_by_all(event, fragment))
    for each in peers:
        each.asked.set()
        each.fleet.stop_soon()  # as at a signal: who asked between two steps only might wait for others and leave alone
    for each in peers:
        each.thread.join(LIMIT_S)
        assert not each.thread.is_alive(), f"it did not end: {each.events[-9:]}"
    assert len({each.digest for each in peers}) == 1
    events = [event for each in peers for event in each.events]
    looked = max(event.step for event in events if looks(event))
    assert min(event.step for event in events if isinstance(event, ViewChanged)) <= looked + 1
