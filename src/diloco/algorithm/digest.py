"""The digest of tensors, computed on the device that holds them, with the same bits on every device.

The bytes of a tensor are little-endian int32 lanes x_i in blocks of 2048. Of each block two sums modulo 2^64 are taken,
of k_i x_i and of l_i x_i, with signed 32-bit keys, neither zero, that belong to the lane's place in its block and were
drawn once. BLAKE2b hashes the sums of all blocks, in order, with the names and sizes of the tensors and the last bytes
that fill no lane: 1/512 of what the device reads.

Which differences are found? Take two tensors of one size that differ in lane i of a block, by d, |d| < 2^32. Given all
other keys, a sum is the same for at most one value of k_i, since the products of d with two keys differ by less than
2^64; so both sums are the same for one in 2^64 of all choices of the keys. This holds for any difference (values or
blocks swapped, signs, zeros). One within a single lane always changes both sums, as 0 < |k_i d| < 2^63. Different sums
have the same 128 bits of BLAKE2b with a probability of 2^-128. Since the keys are known, this finds accidents, not
attacks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from diloco.algorithm.codec import native
from diloco.algorithm.optim import OuterState
from diloco.devices import to_host

BLOCK = 2048  # lanes
_LANE_BYTES = 4
_PIECE_LANES = {"cpu": 1 << 16, "cuda": 1 << 22}  # their products fit in a cache, or in a little of a GPU's memory


def digest_state(global_params: Tensor, state: OuterState, buffers: Mapping[str, Tensor] | None = None) -> str:
    """Return the digest of a fragment's global parameters, ``(numel,)``, and outer state as hexadecimal text.

    ``buffers`` are those of the model that belong to it, if any do.

    >>> digest_state(torch.zeros(2), OuterState()) == digest_state(torch.zeros(2), OuterState(step=1))
    False
    """
    return digest_tensors({f"{state.step}": global_params, **state.slots, **(buffers or {})})


def digest_tensors(tensors: Mapping[str, Tensor], implementation: str | None = None) -> str:
    """Return the digest of the names and bytes of ``tensors``, in order, as 32 hexadecimal digits.

    ``implementation`` is ``"torch"``, ``"native"`` (tensors on the CPU only), or None: native if it was built.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = len(data) // _LANE_BYTES * _LANE_BYTES
        digest.update(name.encode() + b"\0" + len(data).to_bytes(8, "little"))
        digest.update(to_host(_block_sums(data[:whole], implementation)).numpy().data)
        digest.update(data[whole:].cpu().numpy().data)
    return digest.hexdigest()


def _block_sums(data: Tensor, implementation: str | None) -> Tensor:
    """Return the two sums of each block of ``data``, ``(4 n,)`` uint8: ``(blocks, 2)`` int64, on its device."""
    if data.storage_offset() % _LANE_BYTES:
        data = data.clone()
    lanes = data.view(torch.int32)
    if lanes.device.type not in _PIECE_LANES:  # Apple's GPUs: what their integers do on overflow is not documented
        lanes = lanes.cpu()
    sums = torch.empty(-(-len(lanes) // BLOCK), 2, dtype=torch.int64, device=lanes.device)
    kernel = _kernel(implementation) if lanes.device.type == "cpu" else None
    if kernel is not None:
        kernel(lanes.data_ptr(), len(lanes), _keys("cpu", torch.int32).data_ptr(), BLOCK, sums.data_ptr())
        return sums
    keys = _keys(str(lanes.device), torch.int64)
    whole, piece = len(lanes) // BLOCK, _PIECE_LANES[lanes.device.type] // BLOCK
    for start in range(0, whole, piece):
        stop = min(start + piece, whole)
        blocks = lanes[start * BLOCK : stop * BLOCK].view(-1, 1, BLOCK)
        sums[start:stop] = (blocks * keys).sum(2)
    if len(sums) > whole:
        rest = lanes[whole * BLOCK :]
        sums[-1] = (rest * keys[:, : len(rest)]).sum(1)
    return sums


@functools.cache
def _kernel(implementation: str | None) -> Callable[..., None] | None:
    kernels = native.load("digest", native.DIGEST, implementation)
    return None if kernels is None else kernels["sums"]


@functools.cache
def _keys(device: str, dtype: torch.dtype) -> Tensor:
    """Return the two keys of each lane of a block, ``(2, BLOCK)``: numbers that nobody chose."""
    drawn = hashlib.shake_128(b"diloco digest").digest(2 * BLOCK * _LANE_BYTES)
    keys = np.frombuffer(drawn, dtype="<i4").astype(np.int64).reshape(2, BLOCK)
    return torch.from_numpy(keys).to(dtype).to(device)  # waits for the copy, so that any stream may read them
