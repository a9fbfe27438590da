"""The interface between a replica and the others: it submits a contribution and gets an average, the same everywhere.

The interface is not ``all_reduce(tensor)``, because quantised bytes can't be summed in transit and a DHT can't promise
a collective.
"""

# ruff: noqa: B027 - methods that do nothing by default

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from diloco.algorithm import Contribution, Mean
from diloco.errors import DiLoCoError, TransportError
from diloco.events import PeerTraffic, Site
from diloco.membership import View
from diloco.protocol import Average
from diloco.transport.virtual_network import VirtualNetwork


@dataclass(frozen=True)
class Pending:
    """The result of a round in flight."""

    wait: Callable[[], Average]
    """Wait until the round is decided and return its average, once.

    Raises:
        RoundVoidError: if the round is void for every replica; the message gives the reason.
        DivergedError: if this replica's digest differs from the majority's; the round is void for every replica.
        RoundTimeoutError: if the round is not decided in the transport's time.
    """


T = TypeVar("T")


def asked(transport: Transport, kind: type[T], method: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, which asks a transport by its ``method``.

    Raises:
        TransportError: a transport of the user's own failed with an error that is not of this package, or returned
            something else than a ``kind``.
    """
    name = f"{type(transport).__module__}.{type(transport).__qualname__}"
    try:
        answer = call()
        if not isinstance(answer, kind):
            raise TypeError(f"it returned {type(answer).__name__}, not {kind.__name__}")
        return answer
    except Exception as error:
        if isinstance(error, DiLoCoError) or name.startswith("diloco."):
            raise
        raise TransportError(f"{method} of the transport {name} raised {type(error).__name__}: {error}.") from error


SnapshotSource = Callable[[int], Mapping[str, Any]]
"""A function from a fragment's index to its global parameters and outer state: a nested state whose tensors must not
change afterwards."""


class Transport(abc.ABC):
    """One replica's connection to the others.

    Attributes:
        replica: this replica's number in the view.
        view: the members that take part in the next round.
        sent_bytes, received_bytes: payload bytes that this replica has moved in all rounds so far, including void ones.
        fetched_bytes: bytes of other replicas' state received so far; 0 if the transport does not count them.
        failure: why this replica takes part in no more rounds, or None if it does.
        network: the emulated links on a virtual clock; None: links are real, or infinitely fast.
        joining: whether the others already train, and this replica has not become a member yet.
        shared_by_ranks: whether all ranks of a replica call this transport together, each holding the whole model.
    """

    replica: int
    view: View
    network: VirtualNetwork | None = None
    joining: bool = False
    shared_by_ranks: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0
    fetched_bytes: int = 0
    failure: TransportError | None = None

    @abc.abstractmethod
    def average(self, contribution: Contribution) -> Pending:
        """Submit a contribution and return at once. The caller must not change the contribution's tensors afterwards.

        Either every replica of the view gets the same average from `Pending.wait`, or every replica gets
        `RoundVoidError`.
        """

    def check(self, contribution: Contribution, *, again: bool) -> None:
        """Raise `TransportError` for another replica's contribution, and for a second one to a round."""
        if again:
            words = f"Replica {self.replica} has already contributed to {contribution.round}. Its first one stands."
            raise TransportError(words, round=str(contribution.round), replicas=[self.replica])
        if contribution.replica != self.replica:
            raise TransportError(
                f"Replica {self.replica} submitted a contribution in the name of replica {contribution.replica}, but a "
                "replica may only contribute for itself. The contribution was ignored."
            )

    @abc.abstractmethod
    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        """Serve ``source(fragment)`` from now on to replicas that `fetch` from this one.

        Args:
            source: returns a fragment's state; it may be called in any thread.
            version: returns a value for a fragment that changes whenever the fragment's state does; None means that the
                state may change at any time.
        """

    @abc.abstractmethod
    def fetch(
        self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None
    ) -> Future[Mapping[str, Any]]:
        """Fetch a copy of the global parameters and outer state of ``fragment`` that ``donors`` hold.

        A transport that can't do that alongside training fetches before it returns. The caller owns the copy.

        Args:
            fragment: index of the fragment.
            donors: members of the view to fetch from; an unresponsive donor does not delay the call if another answers.
            expected_bytes: a larger state is refused; None accepts any size.

        Returns:
            The state, or a `TransportError` if no donor is a member of the view, has published anything, or answers.
        """

    def ranks(self) -> Collection[int]:
        """Return the ranks of torch.distributed that train this replica together; none: not known."""
        return ()

    def traffic_by_peer(self) -> Mapping[str, PeerTraffic]:
        """Return what `RoundCommitted.peers` says; nothing if this transport does not count it."""
        return {}

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare with the other replicas what must be the same on all of them, before the first contribution.

        The call waits for the facts of all members. If two replicas differ, it raises on every one of them. A late
        joiner compares its facts with the members', and only the joiner fails if they differ.

        Args:
            facts: name -> value as text, with the likeliest mistakes first.

        Raises:
            ConfigurationError: if two replicas differ; the message names both and their values.
            RendezvousError: if a member sends no facts within the round timeout; the error names it.
        """

    def tick(self) -> None:
        """Record that this replica has finished an inner step, which advances a virtual clock.

        `DiLoCo` calls this once per step, so a training loop that uses `DiLoCo` must not. After an extra call, late
        joiners would begin one step too late and could miss a round for which the others then wait.
        """

    # What a run asks of it. The defaults are right where all replicas train in one process.

    def names(self) -> Mapping[str, str]:
        """Return the names of the replicas that have one, by number; no two are the same."""
        return {}

    def announce_site(self, site: Site) -> None:
        """Tell the other replicas how this one fares with data of its own, and note it."""

    def sites(self) -> Mapping[int, Site]:
        """Return what each replica has announced last, by number; replicas that have left may be among them."""
        return {}

    def ask_to_stop(self) -> None:
        """Ask all replicas to agree soon on the step that `stop_step` returns. For any thread; it does not wait."""

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """Return the step after which all replicas stop, or None.

        Args:
            step: the number of inner steps done.
            wanted: whether this process wants to stop.
        """
        return step if wanted else None

    def finish(self) -> None:
        """Wait until the others have finished too."""

    def close(self) -> None:
        """Disconnect at once."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the connection for a checkpoint. Who submitted the contributions in flight saves them."""
        return {"traffic": [self.sent_bytes, self.received_bytes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sent_bytes, self.received_bytes = map(int, state["traffic"])


class BackgroundTransport(Transport):
    """A transport that sends in the background, and so can be given a payload that a thread still fills."""

    @abc.abstractmethod
    def average(
        self,
        contribution: Contribution,
        ready: Future[Any] | None = None,
        on_mean: Callable[[Mean], None] | None = None,
    ) -> Pending:
        """Do as `Transport.average`.

        Args:
            contribution: what this replica gives to the round.
            ready: done once the payload is filled; if it fails, nothing is sent. None: it is filled.
            on_mean: called in another thread once the mean is known, before it is known whether the round is committed.
        """
