"""The way for payloads between two ranks: a few gloo connections, made and ended on their own.

A gloo group of two, once for each stream. Nothing but these two ranks can break it, and it is made anew without anybody
else. Groups find each other through the control connection, so no store has to live longer than a replica.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from diloco.errors import TransportError

__all__ = ["NEVER", "DataLink", "Mailbox", "gloo_words", "link_errors", "make_device", "open_link"]

NEVER = timedelta(days=30)
"""For ``Work.wait``: our own watch ends a wait, by closing the link."""

_ABORT_TAG = (1 << 31) - 1


class Mailbox:
    """Short values by key, put there by control messages and waited for in other threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._closed = ""

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``, waiting for it; it stays.

        Raises:
            TransportError: if it does not come in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed, timeout_s)
            if key not in self._values:
                raise TransportError(f"{key} did not come within {timeout_s:g} s. {self._closed}")
            return self._values[key]

    def forget(self, prefix: str) -> None:
        """Drop what begins with ``prefix``."""
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}

    def close(self, reason: str) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()


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

    def wait(self, keys: list[str], timeout: timedelta = NEVER) -> None:
        for key in keys:
            self._mailbox.take(self._prefix + key, min(self._timeout_s, timeout.total_seconds()))


@contextlib.contextmanager
def link_errors() -> Iterator[None]:
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


class DataLink:
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

    def send(self, values: Tensor, stream: int, tag: int) -> dist.Work:
        """Start sending a contiguous CPU tensor; it must stay as it is until the work is done.

        Raises:
            TransportError: if the connection has ended.
        """
        with link_errors():
            return self._groups[stream % len(self._groups)].send([values], self._peer, tag)

    def receive(self, values: Tensor, stream: int, tag: int) -> dist.Work:
        """Start receiving into a contiguous CPU tensor.

        Raises:
            TransportError: if the connection has ended.
        """
        with link_errors():
            return self._groups[stream % len(self._groups)].recv([values], self._peer, tag)

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


def open_link(
    key: str,
    *,
    first: bool,
    streams: int,
    device: object,
    mailbox: Mailbox,
    tell: Callable[[str, bytes], None],
    timeout_s: float,
) -> DataLink:
    """Connect to a peer that opens the same ``key`` with the other value of ``first``.

    Args:
        key: names this link and this attempt, alike on both sides.
        first: whether I am the one of the lower rank.
        streams: number of connections.
        device: of `make_device`.
        mailbox: where the peer's words come in.
        tell: sends a key and a value to the peer's mailbox.
        timeout_s: the longest to wait for the peer.

    Raises:
        TransportError: if it does not come to be; nothing stays open.
    """
    groups: list[dist.ProcessGroup] = []
    try:
        for stream in range(streams):
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
            options._threads = 1
            options._timeout = timedelta(seconds=timeout_s)  # of connecting; waits have their own
            options._devices = [device]
            store = _PairStore(f"{key}/{stream}/", mailbox, tell, timeout_s)
            groups.append(_as_group(ProcessGroupGloo(store, 0 if first else 1, 2, options)))
    except (RuntimeError, TransportError) as error:
        DataLink(groups, 1 if first else 0).close()
        raise TransportError(f"the payload connection {key} could not be made: {str(error).splitlines()[0]}") from error
    return DataLink(groups, 1 if first else 0)
