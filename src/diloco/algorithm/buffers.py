"""Conversion of model buffers to flat vectors and back.

Floating-point buffers are averaged with the last fragment; integer buffers are copied from the first contributor. Only
persistent buffers take part: others, such as a rotary table, are derived and equal on all replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from diloco.algorithm.model_tensors import overlaps, persistent_buffers, unfit_buffer
from diloco.errors import ConfigurationError

__all__ = ["buffer_layout", "check_buffers", "collect_buffers", "not_finite", "restore_buffers_"]


def check_buffers(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `ConfigurationError`, which names the buffer, if a persistent buffer can't be averaged.

    It must not share memory with one of ``parameters``, those that are synchronised. Views of one table may overlap.
    """
    buffers = persistent_buffers(model)
    for name, buffer in buffers.items():
        if why := unfit_buffer(buffer):
            raise ConfigurationError(f"The buffer {name!r} {why}.")
    for one, other in overlaps({**parameters, **buffers}):
        alike = one in buffers and other in buffers and buffers[one].dtype == buffers[other].dtype
        if not alike and (one in buffers or other in buffers):
            raise ConfigurationError(
                f"{one!r} and {other!r} share memory, but a buffer must have memory of its own. Register a clone(), or "
                "with persistent=False if it is derived."
            )


def buffer_layout(model: nn.Module) -> list[str]:
    """Return the name, shape and dtype of each persistent buffer as text."""
    return [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in persistent_buffers(model).items()]


def collect_buffers(model: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return the floating-point buffers as ``(n,)`` float32 and the bytes of all others as ``(n,)`` uint8.

    Each is None if the model has no such buffers. Both are on the CPU, in the order of ``model.named_buffers()``.

    >>> floats, integers = collect_buffers(nn.BatchNorm1d(2))    # running mean and variance; number of batches
    >>> floats.tolist(), integers.numel()
    ([0.0, 0.0, 1.0, 1.0], 8)
    """
    floating, others = _split(model)
    floats = torch.cat([b.detach().float().cpu().reshape(-1) for b in floating.values()]) if floating else None
    integers = None
    if others:
        integers = torch.cat([b.detach().cpu().reshape(-1).view(torch.uint8) for b in others.values()])
    return floats, integers


def restore_buffers_(model: nn.Module, floats: Tensor | None, integers: Tensor | None) -> None:
    """Copy the values returned by `collect_buffers` into the model's buffers, in their own dtype and device."""
    floating, others = _split(model)
    start = 0
    for buffer in floating.values():
        assert floats is not None
        buffer.detach().copy_(floats[start : start + buffer.numel()].view(buffer.shape))
        start += buffer.numel()
    start = 0
    for buffer in others.values():
        assert integers is not None
        stop = start + buffer.numel() * buffer.element_size()
        buffer.detach().copy_(integers[start:stop].clone().view(buffer.dtype).view(buffer.shape))
        start = stop


def not_finite(model: nn.Module, floats: Tensor, agreed: Tensor | None) -> list[str]:
    """Return the names of floating-point buffers with values that have become NaN or infinite.

    Args:
        floats: ``(n,)`` float32, from `collect_buffers`.
        agreed: The values that all replicas held last, or None. What is not finite there may stay as it is: a mask.
    """
    wrong = ~floats.isfinite()
    if agreed is not None and agreed.shape == floats.shape:
        wrong &= floats.view(torch.int32) != agreed.view(torch.int32)
    floating, _ = _split(model)
    parts = torch.split(wrong, [buffer.numel() for buffer in floating.values()])
    return [name for name, part in zip(floating, parts, strict=True) if bool(part.any())]


def _split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    buffers = persistent_buffers(model)
    floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    return floating, {name: buffer for name, buffer in buffers.items() if name not in floating}
