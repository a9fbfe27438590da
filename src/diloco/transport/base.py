"""The one interface between a replica and the others: a contribution in, an average out, the same on every replica.

Not ``all_reduce(tensor)``: quantised bytes can't be summed on the wire, and a DHT can't promise a collective.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from diloco.algorithm.averaging import Contribution
from diloco.errors import TransportError
from diloco.membership.view import View
from diloco.protocol.actions import Average

__all__ = ["Fetching", "Pending", "SnapshotSource", "Transport"]


class Pending(Protocol):
    """An average on its way."""

    def wait(self, timeout_s: float | None = None) -> Average:
        """The average, once the round is decided.

        Args:
            timeout_s: the longest to wait; None: the transport's round timeout.

        Raises:
            RoundVoidError: the round is void for every replica; it says why.
            DivergedError: this replica's digest differs from the majority's; the round is void for every replica.
            RoundTimeoutError: nothing was decided in time; it names the replicas that were not heard of.
        """


class Fetching(Protocol):
    """A fragment's state on its way."""

    def done(self) -> bool:
        """Whether `result` does not wait any more."""
        ...

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        """As `Transport.fetch`; `TimeoutError` if it is not done after ``timeout`` seconds."""
        ...


SnapshotSource = Callable[[int], Mapping[str, Any]]
"""Fragment index -> that fragment's global parameters and outer state, as a nested state of tensors that nobody changes
afterwards."""


class Transport(abc.ABC):
    """One replica's way to the others.

    Attributes:
        replica: this replica's number in the view.
        view: who takes part in the next round.
        sent_bytes, received_bytes: payload moved by this replica in all rounds so far, void ones included.
        fetched_bytes: of others' state that have come so far, where the transport counts them; else 0.
        shared_by_ranks: whether all ranks of a replica call this transport together, each holding the whole model.
    """

    replica: int
    view: View
    shared_by_ranks: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def fetched_bytes(self) -> int:
        return 0

    @abc.abstractmethod
    def average(self, contribution: Contribution) -> Pending:
        """Hand in a contribution; returns at once. Afterwards the contribution's tensors must not be changed.

        Every replica of the view gets the same average from `Pending.wait`, or every replica gets `RoundVoidError`.
        """

    def check_name(self, contribution: Contribution) -> None:
        """Raise `TransportError` for another replica's contribution."""
        if contribution.replica != self.replica:
            raise TransportError(
                f"replica {self.replica} handed in a contribution in the name of replica {contribution.replica}; each "
                "replica contributes for itself. It was not taken."
            )

    @abc.abstractmethod
    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        """From now on, answer those who `fetch` from this replica with ``source(fragment)``.

        Args:
            source: called in any thread.
            version: fragment -> something that differs once the fragment's state has changed; None: it may at any time.
        """

    @abc.abstractmethod
    def fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Mapping[str, Any]:
        """What ``donors`` have as global parameters and outer state of ``fragment``: a copy that is the caller's own.

        Args:
            fragment: which one.
            donors: members of the view; one that does not answer is not waited for where another does.
            expected_bytes: more than this is refused; None: anything is taken.

        Raises:
            TransportError: if none of them is a member of the view, or has published anything, or answers.
        """

    def agree(self, facts: Mapping[str, str]) -> None:  # noqa: B027 - where there are no others, all agree
        """Compare what must be the same on all replicas with the others, before the first contribution.

        Waits until all members have told theirs, or raises on every side where two differ. Who joins later compares
        with the members, and they don't with it.

        Args:
            facts: name -> value in words, the likeliest mistakes first.

        Raises:
            ConfigurationError: two replicas differ; it names both, and what each has.
            RendezvousError: a member told nothing for as long as a round may take; it is named.
        """

    def fetch_beside(self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None) -> Fetching:
        """`fetch` beside the training, where the transport can; else it is done when this returns.

        What goes wrong is raised by `Fetching.result`.
        """
        fetched: Future[Mapping[str, Any]] = Future()
        try:
            fetched.set_result(self.fetch(fragment, donors, expected_bytes))
        except TransportError as error:
            fetched.set_exception(error)
        return fetched

    def tick(self) -> None:  # noqa: B027 - a transport without a virtual clock has nothing to do
        """One inner step of this replica is done; a virtual clock moves on.

        `DiLoCo` calls it in each of its steps. Who trains with `DiLoCo` does not: one call more, and those who join
        later begin a step too late, and may miss a round that the others then wait for.
        """
