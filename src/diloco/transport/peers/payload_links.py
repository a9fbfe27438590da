"""Payload connections between the members of the present view: made in threads of their own, ended with the view."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future

from diloco.errors import TransportError
from diloco.membership.view import View
from diloco.protocol.rules import Policies, Rules
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import DataLink, LinkRequest, OpenLink
from diloco.transport.peers.threads import Threads

__all__ = ["Links", "PayloadLinks"]

Links = Mapping[int, DataLink]
"""Replica -> the way to it."""


class PayloadLinks:
    """One link to the rank of the same position in each other replica. In the control thread but for `_connect`.

    Args:
        rules: who I am.
        policies: how many streams a link has, and how long making one may take.
        connections: control connections, over which both ends of a link find each other.
        threads: of this rank.
    """

    def __init__(self, rules: Rules, policies: Policies, connections: ConnectionManager, threads: Threads) -> None:
        self._rules = rules
        self._policies = policies
        self._connections = connections
        self._threads = threads
        self._wanted: Future[Links] | None = None
        self._made: Links = {}

    def open(self, view: View, open_link: OpenLink) -> Future[Links]:
        """Begin to make the links of ``view``; the future gets them, or a `TransportError` that names the replicas."""
        self.close()
        links: Future[Links] = Future()
        self._wanted = links
        self._threads.start(self._connect, view, open_link, links, name="diloco-connect")
        return links

    def close(self) -> None:
        """End the links; those that are still being made end as soon as they stand."""
        made, wanted, self._made, self._wanted = self._made, self._wanted, {}, None
        if wanted is not None and not wanted.done():
            wanted.set_exception(TransportError("the view has ended"))
        for link in made.values():
            link.close()

    def _connect(self, view: View, open_link: OpenLink, links: Future[Links]) -> None:
        """In a thread: to all peers at once."""
        made: dict[int, DataLink] = {}
        failed: dict[int, str] = {}

        def connect(peer: int) -> None:
            try:
                made[peer] = open_link(self._request(view, peer))
            except TransportError as error:
                failed[peer] = str(error)
            except Exception as error:  # a thread that raised would look like one that has made its link
                why = f"{type(error).__name__}: {error}"
                failed[peer] = f"the payload connection to replica {peer} could not be made: {why}"

        peers = [member for member in view.members if member != self._rules.replica]
        threads = [threading.Thread(target=connect, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._connections.post(self._connected, links, made, failed)

    def _request(self, view: View, peer: int) -> LinkRequest:
        me, position = self._rules.replica, self._rules.position
        (low, high), rank = sorted((me, peer)), peer * self._rules.ranks_per_replica + position

        def tell(key: str, value: bytes) -> None:
            self._connections.post(self._connections.send, rank, {"kind": "store", "key": key}, value)

        return LinkRequest(
            f"{view.id}/{low}-{high}/{position}",
            rank=rank,
            first=me < peer,
            streams=self._policies.streams,
            timeout_s=self._policies.connect_timeout_s,
            tell=tell,
        )

    def _connected(self, links: Future[Links], made: Links, failed: Mapping[int, str]) -> None:
        if links is not self._wanted:
            for link in made.values():
                link.close()
            return
        self._made = made
        if failed:
            links.set_exception(TransportError("; ".join(failed.values()), replicas=failed))
        else:
            links.set_result(made)
