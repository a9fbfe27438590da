"""The way for payloads between two ranks: a few gloo connections, made and ended on their own.

A gloo group of two, once for each stream. Nothing but these two ranks can break it, and it is made anew without anybody
else. Groups find each other through the control connection, so no store has to live longer than a replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from diloco.errors import TransportError
from diloco.transport.peers.data_link import LinkRequest, OpenLink
from diloco.transport.peers.threads import Mailbox

__all__ = ["GlooLink", "gloo_words", "link_opener", "make_device"]

_NEVER = timedelta(days=30)
"""For ``Work.wait``: our own watch ends a wait, by closing the link."""

_ABORT_TAG = (1 << 31) - 1

_MOST_STREAMS = 64


class _PairStore(Store):
    """What two ranks need to know to connect a group of two: each one's address, by control message."""

    def __init__(self, prefix: str, mailbox: Mailbox, tell: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._prefix = prefix
        self._mailbox = mailbox
        self._tell = tell
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._mailbox.put(self._prefix + key, data)
        self._tell(self._prefix + key, data)

    def get(self, key: str) -> bytes:
        return self._mailbox.take(self._prefix + key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta = _NEVER) -> None:
        for key in keys:
            self._mailbox.take(self._prefix + key, min(self._timeout_s, timeout.total_seconds()))


@contextlib.contextmanager
def _link_errors() -> Iterator[None]:
    """Around what uses a link: gloo's plain errors become a `TransportError`."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"a payload connection ended: {gloo_words(error)}") from error


def gloo_words(error: RuntimeError) -> str:
    """What happened, without gloo's own source file and advice.

    >>> gloo_words(RuntimeError("[gloo/pair.cc:553] Connection closed by peer [::1]:5. This is typically caused by"))
    'Connection closed by peer [::1]:5'
    """
    words = str(error).partition("\n")[0].partition(". This is typically")[0]
    return words.partition("] ")[2] if words.startswith("[") else words


class _GlooWork:
    """A gloo operation whose errors are ours."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        with _link_errors():
            self._work.wait(_NEVER)


class GlooLink:
    """Payload streams to one other rank.

    Args:
        groups: one gloo group of two for each stream.
        peer: 0 or 1: the other one's place in them.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], peer: int) -> None:
        self._groups = list(groups)
        self._peer = peer

    @property
    def num_streams(self) -> int:
        return len(self._groups)

    def send(self, values: Tensor, stream: int, tag: int) -> _GlooWork:
        """Start sending a contiguous CPU tensor; it must stay as it is until the work is done.

        Raises:
            TransportError: if the connection has ended.
        """
        with _link_errors():
            return _GlooWork(self._groups[stream % len(self._groups)].send([values], self._peer, tag))

    def receive(self, values: Tensor, stream: int, tag: int) -> _GlooWork:
        """Start receiving into a contiguous CPU tensor.

        Raises:
            TransportError: if the connection has ended.
        """
        with _link_errors():
            return _GlooWork(self._groups[stream % len(self._groups)].recv([values], self._peer, tag))

    def close(self) -> None:
        """End the connections; whoever waits on them gets an error at once.

        gloo offers one way to close a pair from outside: an operation that times out. So one is made that must.
        """
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], self._peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def make_device(host: str, interface: str) -> object:
    """What gloo listens on: the address ``host`` of this machine, or a network interface by name.

    Raises:
        TransportError: if gloo can't listen there.
    """
    try:
        if interface:
            return ProcessGroupGloo.create_device(interface=interface)
        return ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        where = f"interface {interface!r}" if interface else f"address {host!r}"
        raise TransportError(
            f"gloo can't listen on the {where} of this machine: {str(error).splitlines()[0]} An interface (see "
            "`ip address`) or address of this machine would work (transport.interface, transport.host). "
            "Nothing was started."
        ) from error


def _as_group(backend: Any) -> dist.ProcessGroup:
    """A gloo backend has the sends and receives of a group; torch's stubs do not say so."""
    group: dist.ProcessGroup = backend
    return group


def link_opener(device: object, mailbox: Mailbox) -> OpenLink:
    """Opens links whose ends find each other by control messages.

    Args:
        device: of `make_device`.
        mailbox: where the peer's words come in.
    """
    return lambda request: _open_link(request, device, mailbox)


def _open_link(request: LinkRequest, device: object, mailbox: Mailbox) -> GlooLink:
    """All streams at once: each takes some trips, one after the other."""
    place = 0 if request.first else 1

    def open_stream(stream: int) -> dist.ProcessGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        options._threads = 1
        options._timeout = timedelta(seconds=request.timeout_s)  # of connecting; waits have their own
        options._devices = [device]
        store = _PairStore(f"{request.key}/{stream}/", mailbox, request.tell, request.timeout_s)
        return _as_group(ProcessGroupGloo(store, place, 2, options))

    number = _agreed_streams(request, mailbox)
    with ThreadPoolExecutor(number, "diloco-connect") as pool:
        opening = [pool.submit(open_stream, stream) for stream in range(number)]
    failures = [each.exception() for each in opening if each.exception() is not None]
    link = GlooLink([each.result() for each in opening if each.exception() is None], 1 - place)
    if failures:
        link.close()
        why = str(failures[0]).splitlines()[0]
        raise TransportError(f"the payload connection {request.key} could not be made: {why}") from failures[0]
    return link


def _agreed_streams(request: LinkRequest, mailbox: Mailbox) -> int:
    """The larger number of what both ends would open: one that loss slows down needs them for what it sends.

    Raises:
        TransportError: if the other end's does not come in time, or is no number of streams.
    """
    mine, theirs = (f"{request.key}/streams-of-{end}" for end in ((0, 1) if request.first else (1, 0)))
    request.tell(mine, b"%d" % request.streams)
    said = mailbox.take(theirs, request.timeout_s)
    if not said.isdigit() or not 1 <= int(said) <= _MOST_STREAMS:
        raise TransportError(f"the other end of {request.key} asks for {said[:20]!r} streams")
    return max(request.streams, int(said))
