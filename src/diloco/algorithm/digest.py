"""Digests: 128 bits (XXH3) that tell whether two replicas hold the same bits. They find accidents, not attacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor

from diloco.algorithm.outer_optimizer import OuterState

__all__ = ["PIECE_BYTES", "digest_state", "digest_tensors", "host_pieces"]

PIECE_BYTES = 1 << 25  # of what is hashed of a GPU's memory at once: 32 MiB, of which two are pinned


def digest_state(global_params: Tensor, state: OuterState) -> str:
    """Digest of the global parameters ``(numel,)`` and outer state of a fragment, as hexadecimal text.

    >>> digest_state(torch.zeros(2), OuterState()) == digest_state(torch.zeros(2), OuterState(step=1))
    False
    """
    return digest_tensors({f"{state.step}": global_params, **state.slots})


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Digest of the names and bytes of ``tensors``, in order; those on a GPU are hashed piece by piece on the host."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(name.encode() + b"\0")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for piece in (data,) if data.device.type == "cpu" else host_pieces(data, PIECE_BYTES):
            digest.update(piece.numpy().data)
    return digest.hexdigest()


def host_pieces(data: Tensor, piece_bytes: int) -> Iterator[Tensor]:
    """``data``, ``(n,)`` uint8, through the host's memory, piece by piece: each is valid until the next is asked for,
    and is copied while the one before is in use.
    """
    pinned = data.is_cuda
    room = [torch.empty(min(piece_bytes, len(data)), dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    ready: Tensor | None = None
    for number, piece in enumerate(torch.split(data, piece_bytes)):
        here = room[number % 2][: len(piece)]
        here.copy_(piece, non_blocking=True)
        arrived = torch.cuda.current_stream(data.device).record_event() if pinned else None
        if ready is not None:
            yield ready
        if arrived is not None:
            arrived.synchronize()
        ready = here
    if ready is not None:
        yield ready
