"""128-bit digests (XXH3) that show whether two replicas hold the same bits. They detect accidents, not attacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor

from diloco.algorithm.outer_optimizer import OuterState

__all__ = ["PIECE_BYTES", "digest_state", "digest_tensors", "host_pieces"]

PIECE_BYTES = 1 << 25  # 32 MiB: GPU memory is hashed in pieces of this size, two of which are pinned on the host


def digest_state(global_params: Tensor, state: OuterState) -> str:
    """Return the digest of a fragment's global parameters, ``(numel,)``, and outer state as hexadecimal text.

    >>> digest_state(torch.zeros(2), OuterState()) == digest_state(torch.zeros(2), OuterState(step=1))
    False
    """
    return digest_tensors({f"{state.step}": global_params, **state.slots})


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of the names and bytes of ``tensors``, in order. The host hashes GPU tensors in pieces."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(name.encode() + b"\0")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for piece in (data,) if data.device.type == "cpu" else host_pieces(data, PIECE_BYTES):
            digest.update(piece.numpy().data)
    return digest.hexdigest()


def host_pieces(data: Tensor, piece_bytes: int) -> Iterator[Tensor]:
    """Yield ``data``, ``(n,)`` uint8, in pieces copied to host memory.

    Each piece is valid until the next one is requested, and is copied while the caller uses the one before it.
    """
    pinned = data.is_cuda
    size = min(piece_bytes, len(data))
    buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2)]
    ready: Tensor | None = None
    for number, piece in enumerate(torch.split(data, piece_bytes)):
        host = buffers[number % 2][: len(piece)]
        host.copy_(piece, non_blocking=True)
        arrived = torch.cuda.current_stream(data.device).record_event() if pinned else None
        if ready is not None:
            yield ready
        if arrived is not None:
            arrived.synchronize()
        ready = host
    if ready is not None:
        yield ready
