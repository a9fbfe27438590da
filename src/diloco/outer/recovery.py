"""Exchange of global parameters and outer state between replicas: publishing a replica's own and adopting others'."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from diloco.algorithm import AlphaMerge, OuterLoop, OuterState, digest_state
from diloco.errors import DivergedError, FragmentError, TransportError
from diloco.events import StateFetched
from diloco.protocol import Average
from diloco.transport import Fetching, Transport
from diloco.units import format_bytes
from diloco.waiting import waiting_for

__all__ = ["SharedState", "StateRecovery"]

_PROGRESS_INTERVAL_S = 1.0


class SharedState:
    """An outer loop whose state any thread can copy consistently while the training thread changes it."""

    def __init__(self, outer_loop: OuterLoop) -> None:
        self.outer_loop = outer_loop
        # rounds of each fragment that this replica has finished, committed or void
        self.finished_rounds = [0] * len(outer_loop.fragments)
        # how the replicas divide the data among themselves, if a joiner can't derive it (see `Batches.order`); else ""
        self.data_order = ""
        self.begun_after = 0  # inner steps of the run before its outer loop began
        self._changes = [0] * len(outer_loop.fragments)
        self._lock = threading.Lock()

    @contextmanager
    def changing(self, fragment: int) -> Iterator[None]:
        """Hold off snapshots while the fragment or its ``finished_rounds`` change."""
        with self._lock:
            self._changes[fragment] += 1
            yield

    def version(self, fragment: int) -> int:
        """Return a number that differs after every change of the fragment."""
        return self._changes[fragment]

    def snapshot(self, fragment: int) -> dict[str, Any]:
        """Return a copy of the fragment's state together with its ``finished_rounds``."""
        with self._lock, _settled(self.outer_loop.device):
            state = self.outer_loop.fragment_state(fragment)
            return {
                "global_params": state["global_params"].clone(),
                "outer_step": state["outer_step"],
                "slots": {name: values.clone() for name, values in state["slots"].items()},
                "finished_rounds": self.finished_rounds[fragment],
                "begun_after": self.begun_after,
                **({"data_order": self.data_order} if self.data_order else {}),
            }


@contextmanager
def _settled(device: torch.device) -> Iterator[None]:
    """Wait for a GPU at both ends of a ``with`` block: other threads may change its memory on streams of their own."""
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    settle(device)
    yield
    settle(device)


@dataclass(frozen=True, eq=False)
class _Fetch:
    """A fetch in the background."""

    fragment: int
    donor: int
    fetching: Fetching
    missed: list[Average] = field(default_factory=list)  # averages of the rounds since the fetch began


class StateRecovery:
    """Brings a replica's global parameters and outer state up to those of the other replicas.

    A joining replica fetches every fragment before it becomes a member (`fetch_all`). Rounds that the others finish
    meanwhile leave some fragments out of date, which the first exchange of each fragment detects. The replica then
    fetches these fragments again in the background, one at a time, while it trains (`round_missed`, `poll`). It keeps
    the averages of the rounds that pass until the state arrives, at 4 bytes per value and round, and then applies
    their outer steps to that state. So a slow fetch still ends up to date, and no replica waits for it.

    The headers of each round contain the digest of the state that the other replicas hold. A fetched state with a
    different digest is rejected, and from then on the donors are asked one at a time.
    """

    def __init__(self, shared: SharedState, transport: Transport) -> None:
        self._shared = shared
        self._loop = shared.outer_loop
        self._transport = transport
        self._queue: dict[int, int] = {}  # fragment to fetch -> the donor to ask first, in the order found
        self._fetch: _Fetch | None = None
        # fragment -> rounds contained in the state adopted since the fragment was last sent
        self._rounds_adopted: dict[int, int] = {}
        self._unconfirmed: set[int] = set()  # fragments with an adopted state that no header has confirmed yet
        self._mismatches: Counter[int] = Counter()  # fragment -> fetched states that differed from the others' state

    def change_transport(self, transport: Transport) -> None:
        """Continue over another transport and abandon the current fetches."""
        self._transport = transport
        self._queue.clear()
        self._rounds_adopted.clear()
        self._unconfirmed.clear()
        self._mismatches.clear()
        self._fetch = None

    def fetch_all(self, donors: Sequence[int], *, keep_work: bool, step: int) -> Iterator[StateFetched]:
        """Adopt every fragment now. Yield the progress once a second and whenever a fragment has been adopted.

        Args:
            keep_work: True shifts the local parameters by the change of the global ones; False replaces them.

        Raises:
            TransportError: if none of ``donors`` answers.
        """
        expected = {fragment.index: self._expected_bytes(fragment.index) for fragment in self._loop.fragments}
        index, before = 0, self._transport.fetched_bytes

        def progress(*, here: bool = False) -> StateFetched:
            """Return what has been received of fragment ``index`` and of those before it; repeated bytes count once."""
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

        with waiting_for(lambda: f"the state of another replica ({_percentages(progress())})"):
            for index, expected_bytes in expected.items():
                before = self._transport.fetched_bytes
                fetching = self._transport.fetch_in_background(index, donors, expected_bytes)
                while not _ended(fetching, _PROGRESS_INTERVAL_S):
                    yield progress()
                state = fetching.result()
                carrying = self._loop.carrying_over(index) if keep_work else nullcontext()
                finished = _count(index, state, "finished_rounds")  # may raise, so read it before changing anything
                begun_after = _count(index, state, "begun_after")
                with self._shared.changing(index), carrying:
                    self._load(index, state)
                    self._shared.finished_rounds[index] = finished
                    self._shared.begun_after = begun_after
                    self._shared.data_order = str(state.get("data_order", ""))
                    if not keep_work:
                        self._loop.merge(index, AlphaMerge(), None)
                yield progress(here=True)

    def resync(self, index: int, error: DivergedError) -> str:
        """Adopt the majority's state of a fragment now. Work not yet shared stays in the local parameters.

        Returns:
            The outcome, as a sentence.
        """
        donor, replica = error.donor, self._transport.replica
        others = [m for m in self._transport.view.members if m not in (donor, *error.replicas)]
        try:
            # all at once, then one by one: a faulty member may have answered first
            for asked in ([donor, *others], [donor], *([other] for other in others)):
                state = self._transport.fetch(index, asked, self._expected_bytes(index))
                if self._digest(index, state) == error.digest:
                    with self._shared.changing(index), self._loop.carrying_over(index):
                        self._load(index, state)
                    return f"Replica {replica} adopted the state of replica {donor}."
        except TransportError as failure:  # the next round of this fragment detects the difference again
            return f"Adopting the state of replica {donor} failed: {failure}"
        return f"Replica {replica} adopted no state: no state that it received is the majority's."

    def round_begins(self, index: int) -> None:
        """Note that a round of the fragment begins with the current state.

        If the others' digest differs in that round, the current state is out of date.
        """
        self._rounds_adopted.pop(index, None)

    def round_missed(self, average: Average, donor: int) -> str:
        """Handle the average of a round that began while this replica did not hold the others' state.

        Returns:
            The consequence, as a sentence.
        """
        index, outer_step = average.round.fragment, average.round.outer_step
        status = f"{average.round}: replica {self._transport.replica} is still fetching the state"
        adopted = self._rounds_adopted.get(index, -1)
        if adopted == outer_step and self._loop.digest(index) == average.held:  # adopted since the round began
            with self._shared.changing(index), self._loop.carrying_over(index):
                self._loop.outer_step(index, average.values)
                self._rounds_adopted[index] = self._shared.finished_rounds[index] = outer_step + 1
            return f"{status}; the state has arrived, and this round is now applied to it."
        if adopted > outer_step:
            return f"{status}; the state has arrived and already contains this round."
        if index in self._unconfirmed:
            self._unconfirmed.discard(index)
            self._mismatches[index] += 1
        if self._fetch is not None and self._fetch.fragment == index:
            self._fetch.missed.append(average)
        else:
            self._queue[index] = donor
            self._start_next()
        return f"{status}, which it fetches in the background."

    @property
    def lacking(self) -> tuple[int, ...]:
        """The fragments whose state is known to be out of date, ascending."""
        fetching = () if self._fetch is None else (self._fetch.fragment,)
        return tuple(sorted({*self._queue, *fetching}))

    def poll(self, *, wait: bool = False) -> tuple[str, ...]:
        """Adopt the states that have arrived. Call it between two steps.

        Returns:
            The failures, as sentences.
        """
        failures = []
        while self._fetch is not None and (wait or self._fetch.fetching.done()):
            fetch, self._fetch = self._fetch, None
            try:
                self._adopt(fetch.fragment, fetch.fetching.result(), fetch.missed)
            except TransportError as error:  # the next round of this fragment finds it out of date again
                failures.append(f"Adopting the state of replica {fetch.donor} failed: {error}")
            self._start_next()
        return tuple(failures)

    def _adopt(self, index: int, state: Mapping[str, Any], missed: Sequence[Average]) -> None:
        finished = _count(index, state, "finished_rounds")
        later = [average for average in missed if average.round.outer_step >= finished]
        if later and self._digest(index, state) != later[0].held:
            self._mismatches[index] += 1
            raise TransportError("the received state differs from the one that the other replicas hold.")
        self._unconfirmed.add(index)
        with self._shared.changing(index), self._loop.carrying_over(index):
            self._load(index, state)
            for average in later:
                self._loop.outer_step(index, average.values)
            self._rounds_adopted[index] = max([finished, *(average.round.outer_step + 1 for average in later)])
            self._shared.finished_rounds[index] = self._rounds_adopted[index]

    def _digest(self, index: int, state: Mapping[str, Any]) -> str:
        """Return the digest of a received state that its holder would put into the header of a round."""
        try:
            slots = {name: state["slots"][name] for name in self._loop.outer_states[index].slots}
            return digest_state(state["global_params"], OuterState(int(state["outer_step"]), slots))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _invalid_state(index, error) from error

    def _load(self, index: int, state: Mapping[str, Any]) -> None:
        try:
            self._loop.load_fragment_state(index, state)
        except (FragmentError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise _invalid_state(index, error) from error

    def _start_next(self) -> None:
        if self._fetch is None and self._queue:
            index, donor = next(iter(self._queue.items()))
            del self._queue[index]
            others = [m for m in self._transport.view.members if m not in (donor, self._transport.replica)]
            asked = [donor, *others]
            if self._mismatches[index]:
                asked = [asked[(self._mismatches[index] - 1) % len(asked)]]
            fetching = self._transport.fetch_in_background(index, asked, self._expected_bytes(index))
            self._fetch = _Fetch(index, donor, fetching)

    def _expected_bytes(self, index: int) -> int:
        mine = self._loop.fragment_state(index)
        return sum(tensor.nbytes for tensor in (mine["global_params"], *mine["slots"].values()))


def _ended(fetching: Fetching, within_s: float) -> bool:
    try:
        fetching.result(within_s)
    except (TimeoutError, TransportError):
        return fetching.done()
    return True


def _percentages(now: StateFetched) -> str:
    """Describe the progress in per cent, rounded down so that 100 % means complete."""
    of_all = 100 * now.received_bytes // max(1, now.expected_bytes)
    of_fragment = 100 * now.fragment_received_bytes // max(1, now.fragment_expected_bytes)
    came, expected = format_bytes(now.received_bytes), format_bytes(now.expected_bytes)
    return f"{of_all} %, {came} of {expected}; fragment {now.fragment}: {of_fragment} %"


def _count(index: int, state: Mapping[str, Any], name: str) -> int:
    number = state.get(name, 0)
    if type(number) is not int or number < 0:
        raise _invalid_state(index, f"{name} is {str(number)[:40]!r}")
    return number


def _invalid_state(index: int, why: object) -> TransportError:
    return TransportError(f"the received data is not a valid state of fragment {index}: {why}")
