"""Payload links between two ranks: a gloo group of two for each stream.

Only these two ranks can break such a group, and it is made anew without anybody else. They exchange their addresses
over the control connection, so that no store has to outlive a replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
"""For ``Work.wait``: whoever watches the link ends the wait by closing it."""

_ABORT_TAG = (1 << 31) - 1

_MOST_STREAMS = 64


class _PairStore(Store):
    """Where two ranks leave each other the addresses of a group of two; values travel as control messages."""

    def __init__(self, request: LinkRequest, stream: int, mailbox: Mailbox) -> None:
        super().__init__()
        self._request = request
        self._prefix = f"{request.key}/{stream}/"
        self._mailbox = mailbox

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._mailbox.put(self._prefix + key, data)
        self._request.tell(self._prefix + key, data)

    def get(self, key: str) -> bytes:
        return self._mailbox.take(self._prefix + key, self._request.timeout_s)

    def wait(self, keys: list[str], timeout: timedelta = _NEVER) -> None:
        for key in keys:
            self._mailbox.take(self._prefix + key, min(self._request.timeout_s, timeout.total_seconds()))


@contextlib.contextmanager
def _link_errors() -> Iterator[None]:
    """Turns gloo's plain errors into a `TransportError`."""
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
        peer: 0 or 1: the other rank's place in them.
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

        gloo closes a pair from outside in one case only: when an operation times out. So start one that does at once.
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
            f"gloo can't listen on the {where} of this machine: {str(error).splitlines()[0]} Choose an interface (see "
            "`ip address`; transport.interface) or an address (transport.host) of this machine. Nothing was started."
        ) from error


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
        backend: Any = ProcessGroupGloo(_PairStore(request, stream, mailbox), place, 2, options)
        group: dist.ProcessGroup = backend  # a backend sends and receives as a group does; torch's stubs do not say so
        return group

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
    """The larger of the numbers that both ends ask for: an end that loss slows down needs them for what it sends.

    Raises:
        TransportError: if the other end's number does not come in time, or is invalid.
    """
    mine, theirs = (f"{request.key}/streams-of-{end}" for end in ((0, 1) if request.first else (1, 0)))
    request.tell(mine, b"%d" % request.streams)
    said = mailbox.take(theirs, request.timeout_s)
    if not said.isdigit() or not 1 <= int(said) <= _MOST_STREAMS:
        raise TransportError(f"the other end of {request.key} asks for {said[:20]!r} streams")
    return max(request.streams, int(said))
