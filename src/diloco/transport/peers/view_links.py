"""Payload connections between the members of the present view: made in threads of their own, ended with the view."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from diloco.errors import TransportError
from diloco.membership.view import View
from diloco.protocol.rules import Rules
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import DataLink, LinkRequest, OpenLink
from diloco.transport.peers.threads import Threads

__all__ = ["ViewLinks"]

Links = Mapping[int, DataLink]


class ViewLinks:
    """One link to the rank of the same position in each other replica. In the control thread but for `_connect`.

    Args:
        rules: who I am.
        streams: payload connections to each peer.
        timeout_s: the longest that making one may take.
        connections: control connections.
        threads: of this rank.
        open_link: makes a link.
        failed: told of replicas, in words by number, to which no link came to be.
    """

    def __init__(
        self,
        rules: Rules,
        streams: int,
        timeout_s: float,
        connections: ConnectionManager,
        threads: Threads,
        open_link: OpenLink,
        failed: Callable[[Mapping[int, str]], None],
    ) -> None:
        self._rules = rules
        self._streams = streams
        self._timeout_s = timeout_s
        self._connections = connections
        self._threads = threads
        self._open_link = open_link
        self._failed = failed
        self._wanted: Future[Links] | None = None
        self._made: Links = {}

    def connect(self, view: View) -> Future[Links]:
        """Begin to make the links of ``view``; the future gets them by replica, or a `TransportError`."""
        self.close()
        links: Future[Links] = Future()
        self._wanted = links
        self._threads.start(self._connect, view, links, name="diloco-connect")
        return links

    def close(self) -> None:
        """End the links; those that are still being made end as soon as they stand."""
        made, wanted, self._made, self._wanted = self._made, self._wanted, {}, None
        if wanted is not None and not wanted.done():
            wanted.set_exception(TransportError("the view has ended"))
        for link in made.values():
            link.close()

    def _connect(self, view: View, links: Future[Links]) -> None:
        """In a thread: to all peers at once."""
        size, me = self._rules.ranks_per_replica, self._rules.replica
        position = self._rules.rank % size
        made: dict[int, DataLink] = {}
        failed: dict[int, str] = {}

        def connect(peer: int) -> None:
            rank = peer * size + position

            def tell(key: str, value: bytes) -> None:
                self._connections.post(self._connections.send, rank, {"kind": "store", "key": key}, value)

            low, high = sorted((me, peer))
            request = LinkRequest(
                f"{view.id}/{low}-{high}/{position}",
                rank=rank,
                first=me < peer,
                streams=self._streams,
                timeout_s=self._timeout_s,
                tell=tell,
            )
            try:
                made[peer] = self._open_link(request)
            except TransportError as error:
                failed[peer] = str(error)
            except Exception as error:  # a thread that raised would look like one that has made its link
                failed[peer] = (
                    f"the payload connection to replica {peer} could not be made: {type(error).__name__}: {error}"
                )

        peers = [member for member in view.members if member != me]
        threads = [threading.Thread(target=connect, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._connections.post(self._connected, links, made, failed)

    def _connected(self, links: Future[Links], made: Links, failed: Mapping[int, str]) -> None:
        if links is not self._wanted:
            for link in made.values():
                link.close()
            return
        self._made = made
        if failed:
            links.set_exception(TransportError("; ".join(failed.values())))
            self._failed(failed)
        else:
            links.set_result(made)
