"""The payload links between the members of the current view, opened in background threads and closed with the view."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from diloco.algorithm import UNKNOWN_UPLINK, Contribution, Uplink
from diloco.errors import TransportError
from diloco.membership import View
from diloco.protocol import Policies, Rules
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.opened_link import LinkRequest, OpenLink
from diloco.transport.connections.pace import streams_to_each
from diloco.transport.connections.reliable_link import ReliableLink
from diloco.transport.peers.background import Threads

__all__ = ["HostCopies", "Links", "PayloadLinks"]

Links = Mapping[int, ReliableLink]  # by replica


class PayloadLinks:
    """One link to the rank of the same position in each other replica. Its methods run in the control thread.

    If no round has used the links of the view before, the next ones are opened when a round needs them, or when the
    view has lasted for ``idle_s``: while a swarm gathers, views change in quick succession.
    """

    def __init__(
        self, rules: Rules, policies: Policies, connections: ConnectionManager, threads: Threads, idle_s: float
    ) -> None:
        self._idle_s = idle_s
        self._used = False  # whether a round has needed the links of the current view
        self._needed = threading.Event()
        self._rules = rules
        self._policies = policies
        self._connections = connections
        self._threads = threads
        self._wanted: Future[Links] | None = None
        self._made: Links = {}

    def open(self, view: View, open_link: OpenLink) -> Future[Links]:
        """Start to open the links of ``view``. The future gets them, or a `TransportError` that names the replicas."""
        self.close()
        links: Future[Links] = Future()
        self._wanted = links
        self._needed = threading.Event()
        if self._used:
            self._needed.set()
        self._used = False
        self._threads.start(self._connect, view, open_link, links, self._needed, name="diloco-connect")
        return links

    def need(self) -> None:
        """Open the links now, as a round begins."""
        self._used = True
        self._needed.set()

    @property
    def uplink(self) -> Uplink:
        """What is known about the uplink of this rank. For any thread."""
        links = self._made.values()
        full = any(math.isfinite(link.pace.bits_per_s) for link in links)
        return next((link.meter.uplink(full=full) for link in links), UNKNOWN_UPLINK)

    @property
    def descriptions(self) -> dict[int, str]:
        """The description of each replica's link."""
        return {replica: link.description for replica, link in self._made.items()}

    def close(self) -> None:
        """End the links. Those that are still being opened end as soon as they are open."""
        made, wanted, self._made, self._wanted = self._made, self._wanted, {}, None
        if wanted is not None and not wanted.done():
            wanted.set_exception(TransportError("the view has ended"))
        self._needed.set()
        for link in made.values():
            link.close()

    def _connect(self, view: View, open_link: OpenLink, links: Future[Links], needed: threading.Event) -> None:
        """Connect to all peers at once, in a thread."""
        needed.wait(self._idle_s)
        if links.done():  # the view has ended
            return
        made: dict[int, ReliableLink] = {}
        failed: dict[int, str] = {}

        def connect(peer: int) -> None:
            try:
                made[peer] = open_link(self._request(view, peer))
            except TransportError as error:
                failed[peer] = str(error)
            except Exception as error:  # if the thread raised, its link would seem to be open
                why = f"{type(error).__name__}: {error}"
                failed[peer] = f"the payload connection to replica {peer} could not be opened: {why}"

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
        return LinkRequest(
            f"{view.id}/{low}-{high}/{position}",
            rank=rank,
            first=me < peer,
            streams=streams_to_each(len(view.members) - 1),
            timeout_s=self._policies.connect_timeout_s,
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


class HostCopies:
    """Copies payloads from a GPU to the host, in the order in which they are started. Resources are created lazily."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: ThreadPoolExecutor | None = None

    def start(self, contribution: Contribution) -> tuple[Contribution, torch.cuda.Event]:
        """Return the contribution with its payload in pinned host memory, filled once the event has occurred."""
        payload = contribution.payload
        if payload.device not in self._streams:
            self._streams[payload.device] = torch.cuda.Stream(payload.device)  # type: ignore[no-untyped-call]  # torch's stub
        stream = self._streams[payload.device]
        host = torch.empty(payload.shape, dtype=payload.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(payload.device))
        with torch.cuda.stream(stream):
            host.copy_(payload, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
            copied.record(stream)
        payload.record_stream(stream)  # its memory is not reused before the copy is done
        return replace(contribution, payload=host), copied

    def after(
        self, copied: torch.cuda.Event, act: Callable[[], None], on_error: Callable[[BaseException], object]
    ) -> None:
        """Call ``act`` in another thread once the copy is done, or ``on_error`` if it fails."""
        if self._waiting is None:
            self._waiting = ThreadPoolExecutor(1, thread_name_prefix="diloco-copies")

        def wait() -> None:
            try:
                copied.synchronize()
                act()
            except BaseException as error:
                on_error(error)

        self._waiting.submit(wait)

    def close(self) -> None:
        """Wait for the copies, then end the thread."""
        if self._waiting is not None:
            self._waiting.shutdown()
