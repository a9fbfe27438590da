"""A replica in processes of its own that may lose sight of the others, and come back."""

from __future__ import annotations

import abc
import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any

from diloco.errors import RendezvousError, TransportError
from diloco.membership.change import NextView
from diloco.membership.quorum import enough_without
from diloco.membership.view import View
from diloco.transport.base import Transport
from diloco.transport.links import VirtualNetwork
from diloco.transport.peers.connected import Connected
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.replica_group import ReplicaGroup
from diloco.waiting import waiting_for

__all__ = ["Returning"]


class Returning(abc.ABC):
    """One replica in processes of its own, which may lose sight of the others and come back.

    Args:
        connected: the way to the others.

    Attributes:
        transport: that of ``connected``.
        joining: whether the others were at work already when this process came, or came back.
        last: the newest view that this replica was a member of, or had agreed to be, before it lost the others.
    """

    def __init__(self, connected: Connected) -> None:
        self._changed = threading.Condition()
        self._untold: list[NextView] = []
        self.last: View | None = None
        self._go_by(connected)

    def _go_by(self, connected: Connected) -> None:
        self.connected = connected
        self.transport: PeerTransport = connected.transport
        self.joining = connected.joining

    @abc.abstractmethod
    def _look_again(self, last: View, patience_s: float) -> Connected:
        """Close the transport and find the others anew, or found another view with those who look, too.

        A failure leaves nothing open but what the next try needs to be found where this process was.
        """

    def rejoin(self, patience_s: float) -> None:
        """After the others were lost: find them, as one who joins, or found another view for those who look, too.

        Args:
            patience_s: so long they are looked for.

        Raises:
            TransportError: if they aren't found in time, or refuse. It may be called again.
        """
        lost, state = self.transport, self.state_dict()
        self.last = lost.last_view or self.last
        assert self.last is not None, "only a member can lose the others"
        self._go_by(self._look_again(self.last, patience_s))
        self.transport.sent_bytes, self.transport.received_bytes = lost.sent_bytes, lost.received_bytes
        self.transport.step = lost.step
        if not self.joining:
            self.load_state_dict(state)

    def gather(self, timeout_s: float) -> None:
        """As the founder of another view: wait until nobody else can be going on from the last one.

        Raises:
            RendezvousError: if too few come in time.
        """
        last, policy = self.last, self.transport.policies.quorum
        assert last is not None, "the others were lost"

        def enough() -> bool:
            return enough_without(last, frozenset(last.members) - {*self.transport.view.members}, policy)

        def whom() -> str:
            return f"enough of replicas {', '.join(map(str, last.members))} to be back"

        with waiting_for(whom, timeout_s), self._changed:
            self._changed.wait_for(lambda: enough() or self.failure is not None, timeout_s)
        if not enough():
            raise RendezvousError(f"replica {self.transport.replica} founded another view, and too few came to it.")

    def tell_finished(self) -> None:
        """All steps are done: whoever comes back later hears of it. If that fails, it does not."""
        try:
            self.connected.finish()
        except Exception:  # of the DHT, whose errors have no common root
            logging.getLogger(__name__).debug("telling that the run is over failed", exc_info=True)

    def take_news(self) -> tuple[NextView, ...]:
        """The views that were adopted since this was asked last."""
        with self._changed:
            taken, self._untold = self._untold, []
            return tuple(taken)

    def take_words(self) -> str:
        """What else has changed about this process since this was asked last; "" for nothing."""
        return ""

    def _note_view(self, following: NextView) -> None:
        """In the control thread: a view was adopted."""
        with self._changed:
            if following.view is not None:
                self._untold.append(dataclasses.replace(following, reason=self.transport.reason))
            self._changed.notify_all()

    @property
    def failure(self) -> TransportError | None:
        return self.transport.failure

    # As in `Fleet`.

    group: ReplicaGroup
    elastic: bool
    comes_back: bool
    network: VirtualNetwork | None = None

    @property
    def local(self) -> tuple[int, ...]:
        return (self.transport.replica,)

    def endpoint(self, replica: int) -> Transport:
        return self.transport

    def close_to_joiners(self, reason: str) -> None:
        self.transport.close_to_joiners(reason)

    @abc.abstractmethod
    def join(self, timeout_s: float) -> int:
        """Become a member; the inner steps that are done."""

    @property
    @abc.abstractmethod
    def leads(self) -> bool: ...

    @abc.abstractmethod
    def stop_step(self, step: int, *, wanted: bool) -> int | None: ...

    @abc.abstractmethod
    def facts(self) -> dict[str, str]: ...

    @abc.abstractmethod
    def finish(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
