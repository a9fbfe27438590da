"""Exchange of global state between replicas: publishing a replica's own and adopting that of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from diloco.algorithm import AlphaMerge
from diloco.errors import DivergedError, FragmentError, TransportError
from diloco.events import StateFetched
from diloco.outer.fragment import Fragment
from diloco.outer.shards import ALONE, ShardRanks
from diloco.protocol import Average
from diloco.state_tree import UNREADABLE
from diloco.transport import Transport
from diloco.units import format_bytes
from diloco.waiting import waiting_for

_PROGRESS_INTERVAL_S = 1.0

_IDLE, _ARRIVED, _PENDING, _FAILED = range(4)
"""What a rank knows about the state of a fragment. The greatest of all ranks of a replica decides what they do."""


Outcome = tuple[Mapping[str, Any], int, Sequence[Average]] | TransportError | None


@dataclass(eq=False)
class _Standing:
    """How far this replica's state of a fragment is that of the others."""

    fragment: Fragment
    donor: int | None = None  # the replica whose state is to be fetched; None: no state is
    digest: str = ""  # of the state that the majority holds; "" if it is not known
    adopted: int = -1  # the rounds in the state adopted since the last round began; -1: none was
    unconfirmed: bool = False  # whether no header has confirmed the state adopted last
    mismatches: int = 0  # the fetched states that were not what the others hold


@dataclass(frozen=True, eq=False)
class _Fetch:
    standing: _Standing
    digest: str  # of the state that the majority held when the fetch began; "" if it is not known
    fetching: Future[Mapping[str, Any]]
    missed: list[Average] = field(default_factory=list)  # averages of the rounds since the fetch began


def _checked(fragment: Fragment, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Return a state that has been received, and its finished rounds, or raise `TransportError` if it does not fit."""
    try:
        fragment.state.check(state)
        for name in ("finished_rounds", "begun_after"):
            if type(number := state.get(name, 0)) is not int or number < 0:
                raise ValueError(f"{name} is {str(number)[:40]!r}")
    except (FragmentError, *UNREADABLE) as error:
        what = f"the received data is not a valid state of fragment {fragment.index}"
        raise TransportError(f"{what}: {error}") from error
    return state, state.get("finished_rounds", 0)


class StateRecovery:
    """Brings a replica's global parameters and outer state up to those of the other replicas, and publishes its own.

    A joining replica fetches every fragment before it becomes a member (`fetch_all`). Rounds that the others finish
    meanwhile leave some fragments out of date, which the first exchange of each fragment detects. The replica then
    fetches these fragments again in the background, one at a time, while it trains (`round_missed`, `poll`). It keeps
    the averages of the rounds that pass until the state arrives, at 4 bytes per value and round, and then applies
    their outer steps to that state. So a slow fetch still ends up to date, and no replica waits for it.

    The headers of each round contain the digest of the state that the other replicas hold. A fetched state with a
    different digest is rejected, and from then on the donors are asked one at a time.
    """

    def __init__(self, fragments: Sequence[Fragment], transport: Transport, ranks: ShardRanks = ALONE) -> None:
        self.begun_after = 0  # the inner steps of the run before its outer loop began
        self.beside: Mapping[int, Mapping[str, Any]] = {}  # further states to publish, which never change, by number
        self._fragments = fragments
        self._transport = transport
        self._ranks = ranks
        self._fetch: _Fetch | None = None
        self._standings = [_Standing(fragment) for fragment in fragments]

    def snapshot(self, index: int) -> dict[str, Any]:
        """Return a copy of a fragment's global state, and what a joiner needs beside it. Any thread may call it."""
        if index in self.beside:
            return dict(self.beside[index])
        return {**self._fragments[index].state.snapshot(), "begun_after": self.begun_after}

    def version(self, index: int) -> int:
        """Return a number that differs after every change of a fragment's global state."""
        return 0 if index in self.beside else self._fragments[index].state.version

    def change_transport(self, transport: Transport) -> None:
        """Continue over another transport and abandon the current fetches."""
        self._transport = transport
        self._fetch = None
        self._standings = [_Standing(fragment) for fragment in self._fragments]

    def is_behind(self, fragment: Fragment) -> bool:
        """Return whether the state of a fragment lacks rounds of the others, so that theirs is being fetched."""
        return self._standings[fragment.index].donor is not None

    def round_begins(self, fragment: Fragment) -> None:
        """Take note that a fragment is sent: if the others hold another state in its round, this one is out of date."""
        self._standings[fragment.index].adopted = -1

    def fetch_all(self, donors: Sequence[int], *, keep_work: bool, step: int) -> Iterator[StateFetched]:
        """Adopt every fragment now; see `DiLoCo.take_over`. Yield the progress at inner step ``step`` once a second."""
        expected = [fragment.state.num_bytes() for fragment in self._fragments]
        total, index, before = sum(expected), 0, self._transport.fetched_bytes

        def progress(*, here: bool = False) -> StateFetched:
            # repeated bytes count once
            received = expected[index] if here else min(expected[index], self._transport.fetched_bytes - before)
            return StateFetched(
                step=step,
                fragment=index,
                fragment_received_bytes=received,
                fragment_expected_bytes=expected[index],
                received_bytes=received + sum(expected[:index]),
                expected_bytes=total,
                here=here,
            )

        def wait() -> str:
            return f"the state of another replica: {format_bytes(progress().received_bytes)} of {format_bytes(total)}"

        with waiting_for(wait):
            for index, fragment in enumerate(self._fragments):
                before = self._transport.fetched_bytes
                fetching = self._transport.fetch(index, donors, expected[index])
                while not _ended(fetching, _PROGRESS_INTERVAL_S):
                    yield progress()
                state, finished = _checked(fragment, fetching.result())
                if keep_work:
                    fragment.adopt(state, finished)
                else:
                    fragment.state.load(state, finished)
                    fragment.reset_local(AlphaMerge())
                    fragment.reset_buffers()
                    fragment.trained = fragment.submitted = 0.0
                self.begun_after = state.get("begun_after", 0)
                yield progress(here=True)

    def resync(self, fragment: Fragment, error: DivergedError | None) -> str:
        """Adopt the majority's state of a fragment now, and return the outcome as a sentence.

        Call it on all ranks that shard the parameters: those that have diverged (with an ``error``) adopt it, all of
        them or none. Work not yet shared stays in the local parameters.
        """
        standing = self._standings[fragment.index]
        (attempts,) = self._ranks.greatest([len(self._transport.view.members)])
        for _ in range(int(attempts)):  # a faulty member may have answered first; then they are asked one by one
            before = standing.mismatches
            if error is not None:
                self._want(standing, error.donor, error.digest)
            failures = self.poll(wait=True)
            if not any(self._ranks.greatest([standing.mismatches > before])):
                break
        return " ".join(failures) or f"Replica {self._transport.replica} adopted the majority's state."

    def round_missed(self, average: Average, donor: int) -> str:
        """Handle the average of a round that began while this replica did not hold the others' state, and say how."""
        standing, outer_step = self._standings[average.round.fragment], average.round.outer_step
        fragment = standing.fragment
        status = f"{average.round}: replica {self._transport.replica} is still fetching the state"
        if standing.adopted == outer_step and fragment.state.digest() == average.held:  # adopted since it began
            standing.adopted = outer_step + 1
            fragment.adopt(fragment.state.tensors(), outer_step + 1, [average])
            return f"{status}; the state has arrived, and this round is now applied to it."
        if standing.adopted > outer_step:
            return f"{status}; the state has arrived and already contains this round."
        if standing.unconfirmed:
            standing.unconfirmed = False
            standing.mismatches += 1
        if self._fetch is not None and self._fetch.standing is standing:
            self._fetch.missed.append(average)
        else:
            self._want(standing, donor)
        return f"{status}, which it fetches in the background."

    def poll(self, *, wait: bool = False) -> tuple[str, ...]:
        """Adopt the states that have arrived on all ranks, and return the failures as sentences. Call it on all."""
        failures: list[str] = []
        while self._fetch is not None or self._ranks.sharded:  # ranks must ask each other
            if wait and self._fetch is not None:
                _ended(self._fetch.fetching, None)
            outcome = self._outcome()
            agreed = self._ranks.greatest([self._progress(standing, outcome) for standing in self._standings])
            for standing, progress in zip(self._standings, agreed, strict=True):
                if standing.donor is None:
                    continue
                if progress == _FAILED:  # the next round of this fragment finds it out of date again
                    own = isinstance(outcome, TransportError)
                    why = outcome if own else "another rank of this replica could not fetch its part."
                    failures.append(f"Adopting the state of replica {standing.donor} failed: {why}")
                    self._forget(standing)
                elif progress == _ARRIVED:
                    assert isinstance(outcome, tuple), "it has arrived on all ranks, so on this one"
                    standing.unconfirmed, standing.adopted = True, outcome[1]
                    standing.fragment.adopt(*outcome)
                    self._forget(standing)
            self._start_next()
            if not ({_ARRIVED, _FAILED} & set(agreed) or (wait and any(agreed))):
                break
        return tuple(failures)

    def _progress(self, standing: _Standing, outcome: Outcome) -> int:
        if standing.donor is None:
            return _IDLE
        if outcome is None or self._fetch is None or self._fetch.standing is not standing:
            return _PENDING
        return _ARRIVED if isinstance(outcome, tuple) else _FAILED

    def _outcome(self) -> Outcome:
        """Return the arguments of `Fragment.adopt`, why it can't be adopted, or None before it has arrived."""
        if (fetch := self._fetch) is None or not fetch.fetching.done():
            return None
        fragment = fetch.standing.fragment
        try:
            state, finished = _checked(fragment, fetch.fetching.result())
            lacking = [average for average in fetch.missed if average.round.outer_step >= finished]
            held = "" if fetch.missed else fetch.digest  # that of a later state is not known
            if lacking:
                held = lacking[0].held
            if held and fragment.state.digest_of(state) != held:
                fetch.standing.mismatches += 1
                raise TransportError("the received state differs from the one that the other replicas hold.")
        except TransportError as error:
            return error
        return state, max([finished, *(average.round.outer_step + 1 for average in lacking)]), lacking

    def _want(self, standing: _Standing, donor: int, digest: str = "") -> None:
        """Fetch the state of a fragment as soon as no other is being fetched."""
        standing.donor, standing.digest = donor, digest
        self._start_next()

    def _forget(self, standing: _Standing) -> None:
        standing.donor = None
        if self._fetch is not None and self._fetch.standing is standing:
            self._fetch = None

    def _start_next(self) -> None:
        for standing in self._standings:
            if self._fetch is None and standing.donor is not None:
                self._fetch = self._started(standing, standing.donor)

    def _started(self, standing: _Standing, donor: int) -> _Fetch:
        """Begin to fetch the state of a fragment from its donor or from another member."""
        own, fragment = self._transport.replica, standing.fragment
        donors = [donor, *(member for member in self._transport.view.members if member not in (donor, own))]
        if standing.mismatches:  # they are asked one at a time
            donors = [donors[(standing.mismatches - 1) % len(donors)]]
        fetching = self._transport.fetch(fragment.index, donors, fragment.state.num_bytes())
        return _Fetch(standing, standing.digest, fetching)


def _ended(fetching: Future[Mapping[str, Any]], within_s: float | None) -> bool:
    try:
        fetching.result(within_s)
    except (TimeoutError, TransportError):
        return fetching.done()
    return True
