"""Handing a fragment's global parameters and outer state to who asks, over a connection of its own.

So it does not stand in the way of votes, and the donor's training goes on: a copy is made under the donor's own lock,
and sent from there. Nested dictionaries of tensors and numbers; nothing is executed, and sizes are checked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diloco.errors import TransportError
from diloco.transport.address import Address
from diloco.transport.base import SnapshotSource
from diloco.transport.peers.frames import pack, read_frame
from diloco.transport.peers.streams import Streams
from diloco.transport.peers.switchboard import Switchboard

__all__ = ["fetch_state", "serve_state"]

_CHUNK_BYTES = 1 << 22
_POLL_S = 0.1
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)}


class _Publication:
    source: SnapshotSource | None = None


def serve_state(board: Switchboard) -> _Publication:
    """Answer ``fetch`` on ``board`` with what the result's ``source`` gives."""
    publication = _Publication()

    async def serve(
        message: dict[str, Any], blob: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fragment, after = int(message["fragment"]), int(message["after"])
        source = publication.source
        if source is None:
            writer.write(pack({"kind": "refused", "reason": "it has published nothing"}))
            await writer.drain()
            return
        loop = asyncio.get_running_loop()
        try:
            state = await loop.run_in_executor(None, lambda: _copied(source(fragment)))
        except Exception as error:  # the source's own business; the asker hears of it
            writer.write(pack({"kind": "refused", "reason": f"{type(error).__name__}: {error}"}))
            await writer.drain()
            return
        if int(state.get("finished_rounds", after)) < after:
            writer.write(pack({"kind": "later"}))
            await writer.drain()
            return
        tensors: list[Tensor] = []
        writer.write(pack({"kind": "state", "tree": _outline(state, tensors)}))
        for tensor in tensors:
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _CHUNK_BYTES):
                writer.write(pack({"kind": "chunk"}, data[start : start + _CHUNK_BYTES]))
                await writer.drain()

    board.services["fetch"] = serve
    return publication


async def fetch_state(
    streams: Streams, address: Address, fragment: int, after: int, donor: int, timeout_s: float
) -> dict[str, Any]:
    """The state of ``fragment`` at the donor, once it has finished ``after`` rounds of it.

    Raises:
        TransportError: if the donor has none, or does not answer in time.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    asked = f"replica {donor} was asked for fragment {fragment}"
    try:
        while True:
            state = await asyncio.wait_for(
                _fetch_once(streams, address, fragment, after, asked), deadline_s - loop.time()
            )
            if state is not None:
                return state
            await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise TransportError(
            f"{asked}, and it did not answer within {timeout_s:g} s. Nothing was taken over.", replicas=[donor]
        ) from error
    except (OSError, EOFError, KeyError, ValueError, TypeError) as error:
        raise TransportError(
            f"{asked} at {address}, and the connection failed: {error}. Nothing was taken over.", replicas=[donor]
        ) from error


async def _fetch_once(
    streams: Streams, address: Address, fragment: int, after: int, asked: str
) -> dict[str, Any] | None:
    reader, writer = await streams.open(address)
    try:
        writer.write(pack({"kind": "fetch", "fragment": fragment, "after": after}))
        answer, _ = await read_frame(reader)
        if answer["kind"] == "later":
            return None
        if answer["kind"] == "refused":
            raise TransportError(f"{asked}, but {answer['reason']}.")
        tensors: list[Tensor] = []
        state = _filled(answer["tree"], tensors)
        for tensor in tensors:
            room = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
            filled = 0
            while filled < len(room):
                _, chunk = await read_frame(reader)
                room[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
        if not isinstance(state, dict):
            raise TypeError("no dictionary")
        return state
    finally:
        writer.close()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {name: _copied(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _outline(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with every tensor replaced by its type and shape; the tensors in the order met."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"tree": {name: _outline(inner, tensors) for name, inner in value.items()}}
    return {"value": value}


def _filled(outline: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    """What `_outline` described, with room for the tensors."""
    if "tensor" in outline:
        shape = [int(size) for size in outline["shape"]]
        if min(shape, default=0) < 0 or math.prod(shape) > 1 << 40:
            raise ValueError(f"a tensor of shape {shape}")
        tensors.append(torch.empty(shape, dtype=_DTYPES[outline["tensor"]]))
        return tensors[-1]
    if "tree" in outline:
        return {str(name): _filled(inner, tensors) for name, inner in outline["tree"].items()}
    return outline["value"]
