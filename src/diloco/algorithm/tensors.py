"""The parameters and persistent buffers of a model under names that no wrapper changes, and what can be averaged.

Compiled, checkpointed, and DDP- or FSDP-wrapped models have the names of the plain model, so that such replicas work
together. All code that names a model's tensors (fragments, handshake, digests, checkpoints) takes the names from here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco.errors import ConfigurationError

Named = TypeVar("Named", bound=Tensor)

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""The classes of torch that wrap a module, by name (importing them is slow) -> the attribute that holds the module."""


def content_of(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of torch, or None if ``module`` isn't such a wrapper.

    A subclass that holds more than the wrapped module is not a wrapper, since its own names must stay.

    >>> inner = nn.Linear(2, 2)
    >>> content_of(nn.DataParallel(inner)) is inner, content_of(inner)
    (True, None)
    """
    for kind in type(module).__mro__:
        attribute = _WRAPPERS.get(kind.__name__) if kind.__module__.startswith("torch.") else None
        if attribute and list(module._modules) == [attribute] and not module._parameters and not module._buffers:
            return module._modules[attribute]
    return None


def reshard(model: nn.Module) -> None:
    """Make FSDP2's modules hold their shards again; after a forward pass alone they may hold whole parameters."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]  # known by name, since importing FSDP2 is slow


def all_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return each parameter under each of its names; tied ones have several."""
    reshard(model)
    named = list[tuple[str, nn.Parameter]]()
    for prefix, module in _modules(model):
        named += [(prefix + name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
    return named


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter, in the order of the model. Tied parameters appear once, under their first name."""
    return _once(all_parameters(model))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> persistent buffer, each once, whatever the model's own ``state_dict`` contains."""
    return _once(all_buffers(model))


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return each parameter and persistent buffer under each of its names, detached and on the same memory."""
    return {name: tensor.detach() for name, tensor in [*all_parameters(model), *all_buffers(model)]}


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the whole of any other tensor, detached and on the same memory."""
    # detected by its method, so that the algorithm needs no process groups
    to_local = getattr(tensor.detach(), "to_local", None)
    shard: Tensor = tensor.detach() if to_local is None else to_local()
    return shard


def set_whole_(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``tensor`` of the same shape, and into a DTensor this rank's part of it."""
    shard: Any = tensor
    for dimension, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            parts = value.chunk(shard.device_mesh.size(dimension), placement.dim)
            position = shard.device_mesh.get_local_rank(dimension)
            value = parts[position] if position < len(parts) else value.narrow(placement.dim, 0, 0)
    local_shard(tensor).copy_(value)


def unfit_parameter(parameter: Tensor) -> str:
    """Return why float32 global parameters can't hold the values of a trainable parameter, or ""."""
    if is_lazy(parameter):
        return "has no shape yet. Run one batch through the model first"
    shard = local_shard(parameter)
    if why := unfit_memory(shard):
        return f"{why}. Train a plain, dense torch.nn.Parameter with memory of its own"
    if shard.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"is {shard.dtype}, which float32 global parameters can't hold. Use float32, bfloat16 or float16"
    return ""


def shared_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of each two of the tensors that have a byte in common, in the order of their addresses.

    Views whose values interleave, such as the left and the right columns of one matrix, have none.
    """
    shards = {name: local_shard(tensor) for name, tensor in tensors.items() if not is_lazy(tensor)}
    shards = {name: shard for name, shard in shards.items() if _is_dense(shard) and shard.numel() and not shard.is_meta}
    near: dict[str, Tensor] = {}  # those that reach beyond the beginning of the next one
    for name, shard in sorted(shards.items(), key=lambda item: (str(item[1].device), item[1].data_ptr())):
        near = {
            other: before
            for other, before in near.items()
            if before.device == shard.device and before.data_ptr() + _extent(before) > shard.data_ptr()
        }
        for other, before in near.items():
            if _share_bytes(before, shard):
                yield other, name
        near[name] = shard


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last value of a tensor that is not empty."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _share_bytes(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors, of which the ``first`` begins no later, have a byte in common."""
    begins = second.data_ptr() - first.data_ptr()
    # arrays with the layouts of the two, since the memory may be a GPU's; numpy decides it from the layouts alone
    memory = np.empty(max(_extent(first), begins + _extent(second)), dtype=np.uint8)
    one, other = (
        np.ndarray(
            tuple(tensor.shape),
            dtype=f"V{tensor.element_size()}",
            buffer=memory,
            offset=offset,
            strides=tuple(stride * tensor.element_size() for stride in tensor.stride()),
        )
        for tensor, offset in ((first, 0), (second, begins))
    )
    return np.shares_memory(one, other)


def _modules(module: nn.Module, prefix: str = "", above: tuple[nn.Module, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the prefix of its tensors' names for each module, parents first; a module in two places comes twice."""
    yield prefix, module
    content, above = content_of(module), (*above, module)
    for name, child in module._modules.items():
        if child is not None and child not in above:  # a module may hold its parent
            yield from _modules(child, prefix if child is content else f"{prefix}{name}.", above)


def all_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return each persistent buffer under each of its names; one that several modules share has several."""
    named = list[tuple[str, Tensor]]()
    for prefix, module in _modules(model):
        left_out = getattr(module, "_non_persistent_buffers_set", ())
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in left_out:
                named.append((prefix + name, buffer))
    return named


def _once(tensors: list[tuple[str, Named]]) -> dict[str, Named]:
    first: dict[int, str] = {}
    return {name: tensor for name, tensor in tensors if first.setdefault(id(tensor), name) == name}


def unfit_memory(tensor: Tensor) -> str:
    """Return why the values of a tensor can't be read and written one by one in its own memory, or ""."""
    if _is_wrapper(tensor):
        return f"is a {type(tensor).__name__}, whose values are not in its own memory"
    if not _is_dense(tensor):
        return "is not a dense tensor"
    if _repeats(tensor):
        return "repeats its own memory (an expanded view, or windows that overlap)"
    return ""


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not hasattr(tensor, "to_local")


def _is_dense(tensor: Tensor) -> bool:
    strided = not tensor.is_nested and tensor.layout == torch.strided and not tensor.is_quantized
    return strided and not _is_wrapper(tensor)


def _repeats(tensor: Tensor) -> bool:
    """Return whether two values of a dense tensor are in the same place."""
    reach, nested = 1, True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride == 0:
                return True
            nested = nested and stride >= reach  # each step passes all that the shorter ones reach
            reach += stride * (size - 1)
    if nested or not tensor.numel():
        return False
    places = np.zeros((), dtype=np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = np.add.outer(places, stride * np.arange(size))
    return np.unique(places).size < places.size


def _unfit_buffer(buffer: Tensor) -> str:
    """Return why a persistent buffer can't be averaged in float32, nor copied as bytes if it is not floating, or ""."""
    if is_lazy(buffer):
        return "has no shape yet. Run one batch through the model first"
    why = "is sharded over ranks" if hasattr(buffer, "to_local") else unfit_memory(buffer)
    if not why and (buffer.dtype == torch.float64 or buffer.is_complex()):
        why = f"is {buffer.dtype}, which float32 means can't hold"
    return why and f"{why}. Register a plain, dense, real buffer, or with persistent=False if it is derived"


def check_buffers(model: nn.Module) -> None:
    """Raise `ConfigurationError`, which names the buffer, if a persistent buffer can't be averaged.

    It must not share memory with a parameter, which would change with it.
    """
    parameters, buffers = named_parameters(model), persistent_buffers(model)
    for name, buffer in buffers.items():
        if why := _unfit_buffer(buffer):
            raise ConfigurationError(f"The buffer {name!r} {why}.")
    for one, other in shared_memory({**parameters, **buffers}):
        if (one in parameters) != (other in parameters):
            raise ConfigurationError(
                f"{one!r} and {other!r} share memory, but a buffer must have memory of its own. Register a clone(), or "
                "with persistent=False if it is derived."
            )


def buffer_layout(model: nn.Module, at_home: Collection[str] = ()) -> list[str]:
    """Return the name, shape and dtype of each persistent buffer, without those ``at_home``, as text."""
    buffers = {name: buffer for name, buffer in persistent_buffers(model).items() if name not in at_home}
    return [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in buffers.items()]


def collect_buffers(model: nn.Module, at_home: Collection[str] = ()) -> tuple[Tensor | None, Tensor | None]:
    """Return the floating-point buffers as ``(n,)`` float32 and the bytes of all others as ``(n,)`` uint8.

    Those ``at_home`` are left out. Each is None if the model has no such buffers. Both are on the CPU, in the order of
    ``model.named_buffers()``.

    >>> floats, integers = collect_buffers(nn.BatchNorm1d(2))    # running mean and variance; number of batches
    >>> floats.tolist(), integers.numel()
    ([0.0, 0.0, 1.0, 1.0], 8)
    """
    floating, others = _split(model, at_home)
    floats = [buffer.detach().float().cpu().reshape(-1) for buffer in floating.values()]
    integers = [buffer.detach().cpu().reshape(-1).view(torch.uint8) for buffer in others.values()]
    return torch.cat(floats) if floats else None, torch.cat(integers) if integers else None


def named_buffers(
    model: nn.Module, floats: Tensor | None, integers: Tensor | None, at_home: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the values that `collect_buffers` returned under each name of their buffer, in its shape and dtype."""
    values: dict[int, Tensor] = {}
    for source, buffers in zip((floats, integers), _split(model, at_home), strict=True):
        start = 0
        for buffer in buffers.values():
            assert source is not None
            stop = start + buffer.numel() * (1 if source is floats else buffer.element_size())
            part = source[start:stop]
            part = part.to(buffer.dtype) if source is floats else part.clone().view(buffer.dtype)
            values[id(buffer)] = part.view(buffer.shape)
            start = stop
    return {name: values[id(buffer)] for name, buffer in all_buffers(model) if id(buffer) in values}


def restore_buffers_(
    model: nn.Module, floats: Tensor | None, integers: Tensor | None, at_home: Collection[str] = ()
) -> None:
    """Copy the values returned by `collect_buffers` into the model's buffers, in their own dtype and device."""
    buffers = persistent_buffers(model)
    for name, values in named_buffers(model, floats, integers, at_home).items():
        if name in buffers:
            buffers[name].detach().copy_(values)


def _split(model: nn.Module, at_home: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the floating-point buffers and all others, without those ``at_home``."""
    buffers = {name: buffer for name, buffer in persistent_buffers(model).items() if name not in at_home}
    floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    return floating, {name: buffer for name, buffer in buffers.items() if name not in floating}
