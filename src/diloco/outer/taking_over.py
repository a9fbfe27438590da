"""Taking over what the others hold as global parameters and outer state, all at once or while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from diloco.algorithm.merge import AlphaMerge
from diloco.errors import DivergedError, FragmentError, TransportError
from diloco.outer.shared_state import SharedState
from diloco.transport.base import Average, Fetching, Transport
from diloco.units import format_bytes
from diloco.waiting import waiting_for

__all__ = ["TakingOver"]


@dataclass(frozen=True, eq=False)
class _Underway:
    """A fetch beside the training."""

    fragment: int
    donor: int
    fetching: Fetching
    missed: list[Average] = field(default_factory=list)
    """Of the rounds that went by since it began."""


class TakingOver:
    """Brings a replica's global parameters to what the others hold.

    A replica that joins fetches all of them before it is a member (`all_from`). What the others change meanwhile it
    lacks, as it finds at its first exchange of each fragment. It fetches that fragment once more, *beside* the training
    (`missed`, `poll`), one fragment at a time, and keeps the averages of the rounds that go by until it has it (4 bytes
    per value and round): the outer optimizer's steps with these bring what came up to date, so no fetch is ever too
    slow, and nobody waits.

    Args:
        shared: the state that is replaced.
        transport: the way to the others.
    """

    def __init__(self, shared: SharedState, transport: Transport) -> None:
        self._shared = shared
        self._loop = shared.outer_loop
        self.transport = transport
        self._wanted: dict[int, int] = {}  # fragment -> whom to ask first, in the order found
        self._underway: _Underway | None = None
        self._base: dict[int, int] = {}  # fragment -> rounds that are in the state which came since it was sent last

    def change_transport(self, transport: Transport) -> None:
        """Go on over another one; what was being fetched is of no use any more."""
        self.transport = transport
        self._wanted.clear()
        self._base.clear()
        self._underway = None

    def all_from(self, donors: Sequence[int], *, keep_work: bool, taken: Callable[[int], None]) -> None:
        """Every fragment, now.

        Args:
            donors: whom to ask.
            keep_work: whether local parameters move along with the global ones; else they become the global ones.
            taken: called with each fragment, before others can see what changed.

        Raises:
            TransportError: if none of ``donors`` answers.
        """
        expected = sum(self._expected_bytes(fragment.index) for fragment in self._loop.fragments)
        before = self.transport.fetched_bytes

        def rest() -> str:
            came = format_bytes(self.transport.fetched_bytes - before)
            return f"the state of replica {', '.join(map(str, donors))} ({came} of {format_bytes(expected)} are here)"

        with waiting_for(rest):
            for fragment in self._loop.fragments:
                index = fragment.index
                state = self.transport.fetch(index, donors, self._expected_bytes(index))
                carrying = self._loop.carrying_over(index) if keep_work else nullcontext()
                with self._shared.changing(index), carrying:
                    self._load(index, state)
                    self._shared.finished_rounds[index] = _finished_rounds(index, state)
                    self._shared.data_order = str(state.get("data_order", ""))
                    taken(index)
                    if not keep_work:
                        self._loop.merge(index, AlphaMerge(), None)

    def follow(self, index: int, error: DivergedError) -> str:
        """Take over a fragment, now; the work that is not shared yet stays in the local parameters.

        Returns:
            What came of it, in words.
        """
        me = self.transport.replica
        try:
            others = [m for m in self.transport.view.members if m not in (error.donor, *error.replicas)]
            state = self.transport.fetch(index, [error.donor, *others], self._expected_bytes(index))
            with self._shared.changing(index), self._loop.carrying_over(index):
                self._load(index, state)
        except TransportError as failure:  # the next round of this fragment finds out again
            return f"Taking over the state of replica {error.donor} failed: {failure}"
        return f"Replica {me} took over the state of replica {error.donor}."

    def sending(self, index: int) -> None:
        """A round begins with the state held now: if the others hold another one then, this one is not theirs."""
        self._base.pop(index, None)

    def missed(self, average: Average, donor: int) -> str:
        """A round went by that applies to a state which this replica did not hold when the round began.

        Returns:
            What follows, in words.
        """
        index, outer_step = average.round.fragment, average.round.outer_step
        words = f"{average.round}: replica {self.transport.replica} is still taking over the state"
        if self._base.get(index) == outer_step:  # it came after the round began
            with self._shared.changing(index), self._loop.carrying_over(index):
                self._loop.outer_step(index, average.values)
                self._base[index] = self._shared.finished_rounds[index] = outer_step + 1
            return f"{words}, and has it now."
        if self._base.get(index, -1) > outer_step:
            return f"{words}, and has it now, that of this round included."
        if self._underway is not None and self._underway.fragment == index:
            self._underway.missed.append(average)
        else:
            self._wanted[index] = donor
            self._begin_next()
        return f"{words}, which it fetches beside the training."

    @property
    def lacking(self) -> tuple[int, ...]:
        """Fragments whose state is known to be an old one, ascending."""
        underway = () if self._underway is None else (self._underway.fragment,)
        return tuple(sorted({*self._wanted, *underway}))

    def lacks(self, index: int) -> bool:
        """Whether the state of a fragment is known to be an old one."""
        return index in self.lacking

    def poll(self, *, wait: bool = False) -> tuple[str, ...]:
        """Take over what has come; between two steps.

        Args:
            wait: also for what has not come yet.

        Returns:
            What could not be had, a sentence each.
        """
        failures = []
        while self._underway is not None and (wait or self._underway.fetching.done()):
            underway, self._underway = self._underway, None
            try:
                self._take(underway.fragment, underway.fetching.result(), underway.missed)
            except TransportError as error:  # at its next round the fragment is found to be an old one again
                failures.append(f"Taking over the state of replica {underway.donor} failed: {error}")
            self._begin_next()
        return tuple(failures)

    def _take(self, index: int, state: Mapping[str, Any], missed: Sequence[Average]) -> None:
        finished = _finished_rounds(index, state)
        later = [average for average in missed if average.round.outer_step >= finished]
        with self._shared.changing(index), self._loop.carrying_over(index):
            self._load(index, state)
            for average in later:
                self._loop.outer_step(index, average.values)
            self._base[index] = max([finished, *(average.round.outer_step + 1 for average in later)])
            self._shared.finished_rounds[index] = self._base[index]

    def _load(self, index: int, state: Mapping[str, Any]) -> None:
        try:
            self._loop.load_fragment_state(index, state)
        except (FragmentError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_state(index, error) from error

    def _begin_next(self) -> None:
        if self._underway is None and self._wanted:
            index, donor = next(iter(self._wanted.items()))
            del self._wanted[index]
            me = self.transport.replica
            others = [m for m in self.transport.view.members if m not in (donor, me)]
            fetching = self.transport.fetch_beside(index, [donor, *others], self._expected_bytes(index))
            self._underway = _Underway(index, donor, fetching)

    def _expected_bytes(self, index: int) -> int:
        mine = self._loop.fragment_state(index)
        return sum(tensor.nbytes for tensor in (mine["global_params"], *mine["slots"].values()))


def _finished_rounds(index: int, state: Mapping[str, Any]) -> int:
    finished = state.get("finished_rounds", 0)
    if type(finished) is not int:
        raise _no_state(index, f"finished_rounds is {str(finished)[:40]!r}")
    return finished


def _no_state(index: int, why: object) -> TransportError:
    return TransportError(f"what came is no state of fragment {index}: {why}")
