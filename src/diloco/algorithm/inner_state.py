"""The state of an inner optimizer, moved into another one as it is.

`torch.optim.Optimizer.load_state_dict` casts every tensor to the dtype and device of its parameter. An optimizer that
keeps moments of another dtype, counters, masks or text, or that keeps its moments on the host, would train otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], *, on_host: Collection[str] = ()
) -> None:
    """Load what `Optimizer.state_dict` returned, with the optimizer's own method; each tensor keeps its dtype.

    Args:
        on_host: the names of slots whose tensors stay on the host; see `slots_on_host`. Others lie where the
            optimizer's own method puts them.
    """
    optimizer.load_state_dict(dict(state_dict))
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded, saved = optimizer.state.get(parameter, {}), state_dict["state"].get(number, {})
        for slot in loaded.keys() & saved.keys():
            loaded[slot] = _as_saved(loaded[slot], saved[slot], on_host=slot in on_host)


def slots_on_host(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the slots that have tensors on the host though the parameter is elsewhere."""
    names = set[str]()
    for parameter, slots in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.device.type != "cpu":
            names.update(slot for slot, value in slots.items() if _is_on_host(value))
    return sorted(names)


def _is_on_host(value: Any) -> bool:
    return any(tensor.device.type == "cpu" for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _as_saved(loaded: Any, saved: Any, *, on_host: bool) -> Any:
    """Return what was loaded, with ``saved`` in place of each tensor that was cast, and of text."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        device = torch.device("cpu") if on_host else loaded.device
        kept = loaded.shape == saved.shape and (loaded.dtype, loaded.device) != (saved.dtype, device)
        return saved.to(device) if kept else loaded
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {k: _as_saved(v, saved[k], on_host=on_host) if k in saved else v for k, v in loaded.items()}
    if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_as_saved(*pair, on_host=on_host) for pair in zip(loaded, saved, strict=True))
    return saved if isinstance(saved, str) else loaded  # torch takes text for a sequence
