"""Global parameters and outer state between replicas: what this one shows to others, and how it takes over theirs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from diloco.algorithm.digest import digest_state
from diloco.algorithm.merge import AlphaMerge
from diloco.algorithm.outer_loop import OuterLoop
from diloco.algorithm.outer_optimizer import OuterState
from diloco.errors import DivergedError, FragmentError, TransportError
from diloco.events import StateFetched
from diloco.protocol.actions import Average
from diloco.transport.base import Fetching, Transport
from diloco.units import format_bytes
from diloco.waiting import waiting_for

__all__ = ["SharedState", "TakingOver"]

_TELL_EVERY_S = 1.0


class SharedState:
    """An outer loop whose state any thread may copy, never in the middle of a change."""

    def __init__(self, outer_loop: OuterLoop) -> None:
        self.outer_loop = outer_loop
        # for each fragment, its rounds that this replica has finished, committed or void
        self.finished_rounds = [0] * len(outer_loop.fragments)
        # how the replicas share the data out, if a joiner can't know (see `Batches.order`); else ""
        self.data_order = ""
        self.begun_after = 0  # inner steps of the run before its outer loop began
        self._changes = [0] * len(outer_loop.fragments)
        self._lock = threading.Lock()

    @contextmanager
    def changing(self, fragment: int) -> Iterator[None]:
        """Around any change of a fragment or its ``finished_rounds``; snapshots wait."""
        with self._lock:
            self._changes[fragment] += 1
            yield

    def version(self, fragment: int) -> int:
        """A number that is another one after every change of the fragment."""
        return self._changes[fragment]

    def snapshot(self, fragment: int) -> dict[str, Any]:
        """A copy of the fragment's state and its ``finished_rounds``."""
        with self._lock:
            state = self.outer_loop.fragment_state(fragment)
            return {
                "global_params": state["global_params"].clone(),
                "outer_step": state["outer_step"],
                "slots": {name: values.clone() for name, values in state["slots"].items()},
                "finished_rounds": self.finished_rounds[fragment],
                "begun_after": self.begun_after,
                **({"data_order": self.data_order} if self.data_order else {}),
            }


@dataclass(frozen=True, eq=False)
class _Underway:
    """A fetch in the background, and the averages of the rounds since it began."""

    fragment: int
    donor: int
    fetching: Fetching
    missed: list[Average] = field(default_factory=list)


class TakingOver:
    """Brings a replica's global parameters and outer state to what the others hold.

    A joining replica fetches every fragment before it is a member (`all_from`). What the others change meanwhile is
    found at its first exchange of each fragment. It then fetches that fragment again *beside* the training (`missed`,
    `poll`), one fragment at a time, and keeps the averages of the rounds that go by until the state is here (4 bytes
    per value and round). The outer optimizer's steps with these averages bring that state up to date, so a fetch is
    never too slow, and nobody waits. What all hold before a round is in the headers of that round: a state that is
    another one is not kept, and the donors are asked one after the other from then on.
    """

    def __init__(self, shared: SharedState, transport: Transport) -> None:
        self._shared = shared
        self._loop = shared.outer_loop
        self._transport = transport
        self._wanted: dict[int, int] = {}  # fragment -> the donor to ask first, in the order found
        self._underway: _Underway | None = None
        self._base: dict[int, int] = {}  # fragment -> rounds in the state that came since the fragment was last sent
        self._taken: set[int] = set()  # fragments of which a state was taken that no header has confirmed yet
        self._lies: Counter[int] = Counter()  # fragment -> states that turned out to be others than the others'

    def change_transport(self, transport: Transport) -> None:
        """Go on over another transport, and drop what was being fetched."""
        self._transport = transport
        self._wanted.clear()
        self._base.clear()
        self._taken.clear()
        self._lies.clear()
        self._underway = None

    def all_from(self, donors: Sequence[int], *, keep_work: bool, step: int) -> Iterator[StateFetched]:
        """Take over every fragment now; yields how much has come, once a second and when a fragment is here.

        Args:
            keep_work: whether local parameters move along with the global ones; else they become the global ones.

        Raises:
            TransportError: if none of ``donors`` answers.
        """
        expected = {fragment.index: self._expected_bytes(fragment.index) for fragment in self._loop.fragments}
        index, before = 0, self._transport.fetched_bytes

        def come(*, here: bool = False) -> StateFetched:
            """By now, of the fragment ``index`` and of those before it; bytes that came twice count once."""
            received = expected[index] if here else min(expected[index], self._transport.fetched_bytes - before)
            return StateFetched(
                step=step,
                fragment=index,
                fragment_received_bytes=received,
                fragment_expected_bytes=expected[index],
                received_bytes=received + sum(list(expected.values())[:index]),
                expected_bytes=sum(expected.values()),
                here=here,
            )

        with waiting_for(lambda: f"the state of replica {', '.join(map(str, donors))} ({_in_words(come())})"):
            for index, expected_bytes in expected.items():
                before = self._transport.fetched_bytes
                fetching = self._transport.fetch_beside(index, donors, expected_bytes)
                while not _ended(fetching, _TELL_EVERY_S):
                    yield come()
                state = fetching.result()
                carrying = self._loop.carrying_over(index) if keep_work else nullcontext()
                finished = _whole(index, state, "finished_rounds")  # may raise, while nothing has changed
                begun_after = _whole(index, state, "begun_after")
                with self._shared.changing(index), carrying:
                    self._load(index, state)
                    self._shared.finished_rounds[index] = finished
                    self._shared.begun_after = begun_after
                    self._shared.data_order = str(state.get("data_order", ""))
                    if not keep_work:
                        self._loop.merge(index, AlphaMerge(), None)
                yield come(here=True)

    def follow(self, index: int, error: DivergedError) -> str:
        """Take over a fragment now, if it is what the majority holds; work that is not shared yet stays in the local
        parameters.

        Returns:
            The outcome, as a sentence.
        """
        donor, replica = error.donor, self._transport.replica
        others = [m for m in self._transport.view.members if m not in (donor, *error.replicas)]
        try:
            for asked in ([donor, *others], [donor], *([other] for other in others)):  # one of them may lie
                state = self._transport.fetch(index, asked, self._expected_bytes(index))
                if self._digest(index, state) == error.digest:
                    with self._shared.changing(index), self._loop.carrying_over(index):
                        self._load(index, state)
                    return f"Replica {replica} took over the state of replica {donor}."
        except TransportError as failure:  # the next round of this fragment finds the difference again
            return f"Taking over the state of replica {donor} failed: {failure}"
        return f"Replica {replica} took over no state: what was offered is not what the majority holds."

    def sending(self, index: int) -> None:
        """A round begins with the state held now: if the others' turns out to differ, this state is out of date."""
        self._base.pop(index, None)

    def missed(self, average: Average, donor: int) -> str:
        """Deal with the average of a round whose state this replica did not hold when the round began.

        Returns:
            What follows, as a sentence.
        """
        index, outer_step = average.round.fragment, average.round.outer_step
        words = f"{average.round}: replica {self._transport.replica} is still taking over the state"
        base = self._base.get(index, -1)
        if base == outer_step and self._loop.digest(index) == average.held:  # the state came after the round began
            with self._shared.changing(index), self._loop.carrying_over(index):
                self._loop.outer_step(index, average.values)
                self._base[index] = self._shared.finished_rounds[index] = outer_step + 1
            return f"{words}, and has it now."
        if base > outer_step:
            return f"{words}, and has it now, that of this round included."
        if index in self._taken:
            self._taken.discard(index)
            self._lies[index] += 1
        if self._underway is not None and self._underway.fragment == index:
            self._underway.missed.append(average)
        else:
            self._wanted[index] = donor
            self._begin_next()
        return f"{words}, which it fetches beside the training."

    @property
    def lacking(self) -> tuple[int, ...]:
        """Fragments whose state is known to be out of date, ascending."""
        underway = () if self._underway is None else (self._underway.fragment,)
        return tuple(sorted({*self._wanted, *underway}))

    def poll(self, *, wait: bool = False) -> tuple[str, ...]:
        """Take over what has come, between two steps.

        Returns:
            The failures, a sentence each.
        """
        failures = []
        while self._underway is not None and (wait or self._underway.fetching.done()):
            underway, self._underway = self._underway, None
            try:
                self._take(underway.fragment, underway.fetching.result(), underway.missed)
            except TransportError as error:  # the next round of this fragment finds it out of date again
                failures.append(f"Taking over the state of replica {underway.donor} failed: {error}")
            self._begin_next()
        return tuple(failures)

    def _take(self, index: int, state: Mapping[str, Any], missed: Sequence[Average]) -> None:
        finished = _whole(index, state, "finished_rounds")
        later = [average for average in missed if average.round.outer_step >= finished]
        if later and self._digest(index, state) != later[0].held:
            self._lies[index] += 1
            raise TransportError("what was offered is not what the others hold.")
        self._taken.add(index)
        with self._shared.changing(index), self._loop.carrying_over(index):
            self._load(index, state)
            for average in later:
                self._loop.outer_step(index, average.values)
            self._base[index] = max([finished, *(average.round.outer_step + 1 for average in later)])
            self._shared.finished_rounds[index] = self._base[index]

    def _digest(self, index: int, state: Mapping[str, Any]) -> str:
        """Digest of a state that has come, as its holder would say it in a round."""
        try:
            slots = {name: state["slots"][name] for name in self._loop.outer_states[index].slots}
            return digest_state(state["global_params"], OuterState(int(state["outer_step"]), slots))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_state(index, error) from error

    def _load(self, index: int, state: Mapping[str, Any]) -> None:
        try:
            self._loop.load_fragment_state(index, state)
        except (FragmentError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_state(index, error) from error

    def _begin_next(self) -> None:
        if self._underway is None and self._wanted:
            index, donor = next(iter(self._wanted.items()))
            del self._wanted[index]
            others = [m for m in self._transport.view.members if m not in (donor, self._transport.replica)]
            asked = [donor, *others]
            if self._lies[index]:
                asked = [asked[(self._lies[index] - 1) % len(asked)]]
            fetching = self._transport.fetch_beside(index, asked, self._expected_bytes(index))
            self._underway = _Underway(index, donor, fetching)

    def _expected_bytes(self, index: int) -> int:
        mine = self._loop.fragment_state(index)
        return sum(tensor.nbytes for tensor in (mine["global_params"], *mine["slots"].values()))


def _ended(fetching: Fetching, within_s: float) -> bool:
    try:
        fetching.result(within_s)
    except (TimeoutError, TransportError):
        return fetching.done()
    return True


def _in_words(now: StateFetched) -> str:
    """In per cent, rounded down: 100 % are all."""
    of_all = 100 * now.received_bytes // max(1, now.expected_bytes)
    of_fragment = 100 * now.fragment_received_bytes // max(1, now.fragment_expected_bytes)
    came, expected = format_bytes(now.received_bytes), format_bytes(now.expected_bytes)
    return f"{of_all} %, {came} of {expected}; fragment {now.fragment}: {of_fragment} %"


def _whole(index: int, state: Mapping[str, Any], name: str) -> int:
    number = state.get(name, 0)
    if type(number) is not int or number < 0:
        raise _no_state(index, f"{name} is {str(number)[:40]!r}")
    return number


def _no_state(index: int, why: object) -> TransportError:
    return TransportError(f"what came is no state of fragment {index}: {why}")
