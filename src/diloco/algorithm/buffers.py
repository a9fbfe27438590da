"""Conversion of model buffers to flat vectors and back.

Floating-point buffers are averaged with the last fragment; integer buffers are copied from the first contributor. Only
persistent buffers, those in the model's ``state_dict``, take part: others, such as a rotary table, are derived and
equal on all replicas.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diloco.errors import ConfigurationError

__all__ = ["check_buffers", "collect_buffers", "restore_buffers_"]


def check_buffers(model: nn.Module) -> None:
    """Raise `ConfigurationError`, which names the buffer, if a persistent buffer can't be averaged."""
    _split(model)


def collect_buffers(model: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return the floating-point buffers as ``(n,)`` float32 and the bytes of all others as ``(n,)`` uint8.

    Each is None if the model has no such buffers. Both are on the CPU, in the order of ``model.named_buffers()``.
    float64 is rounded to float32.

    >>> floats, integers = collect_buffers(nn.BatchNorm1d(2))    # running mean and variance; number of batches
    >>> floats.tolist(), integers.numel()
    ([0.0, 0.0, 1.0, 1.0], 8)
    """
    floating, others = _split(model)
    floats = torch.cat([b.detach().float().cpu().reshape(-1) for b in floating]) if floating else None
    integers = torch.cat([b.detach().cpu().reshape(-1).view(torch.uint8) for b in others]) if others else None
    return floats, integers


def restore_buffers_(model: nn.Module, floats: Tensor | None, integers: Tensor | None) -> None:
    """Copy the values returned by `collect_buffers` into the model's buffers, in their own dtype and device."""
    floating, others = _split(model)
    start = 0
    for buffer in floating:
        assert floats is not None
        buffer.copy_(floats[start : start + buffer.numel()].view(buffer.shape))
        start += buffer.numel()
    start = 0
    for buffer in others:
        assert integers is not None
        stop = start + buffer.numel() * buffer.element_size()
        buffer.copy_(integers[start:stop].clone().view(buffer.dtype).view(buffer.shape))
        start = stop


def _split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    for name, buffer in buffers.items():
        if buffer.is_complex():
            raise ConfigurationError(
                f"The buffer {name!r} is complex, but only real and integer buffers can be synchronised. Register it "
                "as two real buffers, or with persistent=False if it is derived."
            )
    floating = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
    return floating, [buffer for buffer in buffers.values() if not buffer.is_floating_point()]
