"""What an inner optimizer keeps of the parameters' values: they must move when a merge moves the parameters.

Schedule-free optimizers keep ``z``, Lookahead its slow weights, others a mean of the parameters or a copy in float32.
Left where they are, they would pull the parameters back. Which tensors they are is found by trying: two copies of the
optimizer, with tiny parameters that differ by a constant, take a few steps with the same gradients. What then differs
by this constant is a copy of the parameter; moments, which depend on gradients alone, are equal.
"""

from __future__ import annotations

import inspect
import random
import threading
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diloco.algorithm import local_shard
from diloco.devices import uncompiled

_STEPS = 8
_TINY = 3  # the size of a dimension
_LEARNING_RATE = 1e-5  # so small that updates which depend on the size of the parameters stay alike
_CLOSE = 5e-4  # of the constant by which the parameters differ: rounding; a slow moment moves more in so many steps
_APART = 0.05  # of the constant: a decay that the gradients contain is less

_TRIALS = threading.Lock()  # filters of warnings and the states of generators are restored, and belong to the process

_Path = tuple[Any, ...]  # of keys; an attribute is a `_Attribute`


class _Attribute(str):
    """The name of an attribute in a `_Path`."""


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate and Lightning."""
    while any(kind.__name__ in ("AcceleratedOptimizer", "LightningOptimizer") for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer


class Copies:
    """The tensors in which inner optimizers keep values of parameters, and why some could not be found."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.doubts: list[str] = []
        self._paths: list[tuple[Any, nn.Parameter, _Path]] = []
        for optimizer in map(bare_optimizer, optimizers):
            if _keeps_none(optimizer):
                continue
            name = type(optimizer).__name__
            try:
                with _TRIALS, warnings.catch_warnings(), _same_random(), uncompiled():
                    warnings.simplefilter("ignore")
                    found, mixed = _tried(optimizer)
            except Exception as error:  # of somebody else's code, which meets parameters that are not its own
                self._doubt(name, f"could not be tried out ({type(error).__name__}: {error})")
                continue
            self._paths += [(optimizer, parameter, path) for path, parameter in found]
            if mixed:
                self._doubt(name, f"keeps {', '.join(sorted(mixed))}, which depends on the parameters' values")

    def _doubt(self, name: str, why: str) -> None:
        self.doubts.append(
            f"The inner optimizer {name} {why}, so it isn't known whether it keeps copies of the parameters that pull "
            "them back after a merge. Compare the loss with that of another optimizer."
        )

    def of(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the tensors that hold a value for each element of this rank's part of a parameter."""
        here = [_found(optimizer, path) for optimizer, each, path in self._paths if each is parameter]
        mine = local_shard(parameter)
        tensors = {id(each): local_shard(each) for each in here if isinstance(each, Tensor)}
        # one may be the parameter's own memory, as the one of SAM is after a step
        apart = (each for each in tensors.values() if each.data_ptr() != mine.data_ptr())
        return [each for each in apart if each.numel() == mine.numel()]

    @contextmanager
    def moving(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Move what is kept of some parameters by as much as these move inside the block."""
        kept = [(each, tensors) for each in parameters if (tensors := self.of(each))]
        before = [local_shard(parameter).detach().to(torch.float32, copy=True) for parameter, _ in kept]
        yield
        for (parameter, tensors), values in zip(kept, before, strict=True):
            change = local_shard(parameter).detach().to(torch.float32) - values
            for tensor in tensors:
                tensor.add_(change.view(tensor.shape).to(tensor.device))


@contextmanager
def _same_random() -> Iterator[None]:
    """Leave the generators of torch on the CPU, of Python and of NumPy as they are before the block."""
    python, numpy_ = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)


def _keeps_none(optimizer: Any) -> bool:
    """Return whether it is one of torch or of this package, which keep none, but for `ASGD`."""
    return type(optimizer).__module__.startswith(("torch.", "diloco.")) and type(optimizer) is not torch.optim.ASGD


def _tried(optimizer: Any) -> tuple[list[tuple[_Path, nn.Parameter]], set[str]]:
    """Return where the copies are and of which parameter, and the names of what depends on parameters otherwise.

    Most optimizers make their state in the first step, so they are tried without any; others when they are constructed.
    """
    outcomes, failures = [], list[Exception]()
    for empty in (True, False):
        try:
            outcomes.append(_compared(optimizer, empty=empty))
        except Exception as error:
            failures.append(error)
    if not outcomes:
        raise failures[0]
    found = {path: parameter for places, _ in outcomes for path, parameter in places}
    names = {_name(path) for path in found}
    mixed = {repr(name[-1]) for _, others in outcomes for name in others - names}
    return list(found.items()), mixed


def _drawn(low: int, high: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return whole numbers from ``low`` to below ``high``, which are the same on every processor."""
    return torch.randint(low, high, tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def _compared(optimizer: Any, *, empty: bool) -> tuple[list[tuple[_Path, nn.Parameter]], set[tuple[str, ...]]]:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [[min(size, _TINY) for size in parameter.shape] for parameter in held]
    # any type of parameters can hold these values exactly
    first = [_drawn(-8, 9, shape, generator) / 4 for shape in shapes]
    shifts = [_drawn(16, 25, shape, generator) for shape in shapes]
    gradients = [[_drawn(-64, 65, shape, generator) / 32 for shape in shapes] for _ in range(_STEPS)]
    copied = set() if empty else _like_parameters(optimizer)
    second = [value + shift for value, shift in zip(first, shifts, strict=True)]
    trials = [_Trial(optimizer, held, values, copied, empty=empty) for values in (first, second)]
    for trial in trials:
        torch.manual_seed(0)
        for step in gradients:
            trial.step(step)
    found, mixed = [], set[tuple[str, ...]]()
    one, other = (dict(trial.tensors()) for trial in trials)
    for path in one.keys() & other.keys():
        difference = (other[path].double() - one[path].double()).flatten()
        exact = max(_CLOSE, 4 * torch.finfo(one[path].dtype).eps) if one[path].is_floating_point() else 0.0
        for number in _owners(path, difference.numel(), shifts, held):
            wanted = shifts[number].double().flatten()
            if (difference - wanted).abs().le(exact * wanted).all():
                found.append((path, held[number]))
                break
            if difference.dot(wanted).abs() > _APART * wanted.dot(wanted) or not difference.isfinite().all():
                mixed.add(_name(path))
    return found, mixed


def _owners(path: _Path, numel: int, tensors: Sequence[Tensor], held: Sequence[nn.Parameter]) -> list[int]:
    """Return the numbers of the parameters to which a tensor of ``numel`` values at ``path`` can belong.

    ``tensors`` are as large as the parameters are there. If a parameter is a key of the path, it is this one. Else the
    first is that at the same position, if the tensor is in a list.
    """
    keys = [key for key in path if isinstance(key, nn.Parameter)]
    numbers = [number for number, each in enumerate(held) if not keys or each is keys[-1]]
    if not keys and type(path[-1]) is int and path[-1] < len(held):
        numbers.insert(0, path[-1])
    return [number for number in numbers if tensors[number].numel() == numel > 0]


def _name(path: _Path) -> tuple[str, ...]:
    return tuple(key for key in path if isinstance(key, str)) or ("state",)


def _like_parameters(optimizer: Any) -> set[tuple[str, ...]]:
    """Return the names of what is nearer to the parameters than to zero: it begins as their copy in the trial."""
    distances: dict[tuple[str, ...], list[float]] = {}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for path, tensor in _tensors(optimizer, {id(each): each for each in held}):
        for number in _owners(path, tensor.numel(), held, held)[:1]:
            mine, theirs = (local_shard(each).float().flatten() for each in (tensor, held[number]))
            sums = distances.setdefault(_name(path), [0.0, 0.0])
            sums[0] += float((mine - theirs).pow(2).sum())
            sums[1] += float(theirs.pow(2).sum())
    return {name for name, (apart, size) in distances.items() if apart < 0.25 * size}


class _Trial:
    """A copy of an optimizer around tiny parameters, which are its own."""

    def __init__(
        self,
        optimizer: Any,
        held: Sequence[nn.Parameter],
        values: Sequence[Tensor],
        copied: set[tuple[str, ...]],
        *,
        empty: bool,
    ) -> None:
        self._held, self._copied, self._empty = held, copied, empty
        self.parameters = [
            nn.Parameter(value.to(parameter.dtype).clone()) for value, parameter in zip(values, held, strict=True)
        ]
        self._made: dict[int, Any] = {id(real): tiny for real, tiny in zip(held, self.parameters, strict=True)}
        self._alive: list[Any] = []  # so that no other object gets the number of one that was copied
        self.optimizer = self._copy(optimizer, ())
        for group in self.optimizer.param_groups:
            for key, value in group.items():
                if "weight_decay" in key and isinstance(value, float | int):
                    group[key] = type(value)(0)
            if "capturable" in group:  # only on a GPU
                group["capturable"] = False
            if "lr" in group:
                rate = torch.tensor(_LEARNING_RATE, dtype=torch.float32, device="cpu")
                group["lr"] = rate if isinstance(group["lr"], Tensor) else _LEARNING_RATE
        if callable(train := getattr(self.optimizer, "train", None)):  # schedule-free ones
            train()

    def step(self, gradients: Sequence[Tensor]) -> None:
        def closure() -> Tensor:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype).clone()
            return torch.ones((), dtype=torch.float32, device="cpu")

        closure()
        takes = "closure" in inspect.signature(type(self.optimizer).step).parameters
        type(self.optimizer).step(self.optimizer, **({"closure": closure} if takes else {}))

    def tensors(self) -> Iterator[tuple[_Path, Tensor]]:
        real = {id(tiny): parameter for tiny, parameter in zip(self.parameters, self._held, strict=True)}
        return _tensors(self.optimizer, real)

    def _copy(self, thing: Any, path: _Path) -> Any:
        if id(thing) in self._made:
            return self._made[id(thing)]
        copy: Any
        if isinstance(thing, Tensor):
            copy = self._small(thing, path)
        elif isinstance(thing, dict):
            copy = defaultdict(thing.default_factory) if isinstance(thing, defaultdict) else {}
            self._remember(thing, copy)
            name = str(path[-1]) if path else ""
            left_out = "hook" in name or (self._empty and name == "state")
            for key, value in () if left_out else list(thing.items()):
                copy[self._made.get(id(key), key)] = self._copy(value, (*path, key))
        elif isinstance(thing, list):
            self._remember(thing, copy := [])
            copy += [self._copy(each, (*path, number)) for number, each in enumerate(thing)]
        elif type(thing) in (tuple, set, frozenset):
            copy = type(thing)(self._copy(each, (*path, number)) for number, each in enumerate(thing))
        elif _is_own_object(thing):
            copy = object.__new__(type(thing))
            self._remember(thing, copy)
            for name, value in vars(thing).items():
                if not (name == "step" and callable(value)):  # a scheduler's, which would step the real optimizer
                    vars(copy)[name] = self._copy(value, (*path, _Attribute(name)))
        else:
            return thing
        return self._remember(thing, copy)

    def _remember(self, thing: Any, copy: Any) -> Any:
        self._alive.append(thing)
        self._made[id(thing)] = copy
        return copy

    def _small(self, tensor: Tensor, path: _Path) -> Tensor:
        owners = _owners(path, tensor.numel(), self._held, self._held)
        if not owners:
            return tensor.detach().cpu().clone()
        tiny = self.parameters[owners[0]].detach()
        tiny = tiny.flatten() if tensor.dim() == 1 else tiny
        return (tiny if _name(path) in self._copied else torch.zeros_like(tiny)).to(tensor.dtype, copy=True)


def _is_own_object(thing: Any) -> bool:
    """Return whether it is an optimizer, a module, or an object of a class that is not torch's or of the language."""
    if isinstance(thing, Optimizer | nn.Module):
        return True
    foreign = type(thing).__module__.partition(".")[0] not in _NOT_COPIED
    return hasattr(thing, "__dict__") and foreign and not isinstance(thing, _KEPT)


_KEPT = (type, types.FunctionType, types.MethodType, types.ModuleType, int, float, str, Enum)
_NOT_COPIED = {"torch", "builtins", "functools", "weakref", "threading", "collections", "diloco"}


def _tensors(optimizer: Any, real: Mapping[int, nn.Parameter]) -> Iterator[tuple[_Path, Tensor]]:
    """Yield each tensor in an optimizer, once, that is not a parameter itself; ``real`` are by the `id` of these."""
    seen = set(real)

    def walk(thing: Any, path: _Path) -> Iterator[tuple[_Path, Tensor]]:
        if id(thing) in seen:
            return
        if isinstance(thing, Tensor):
            seen.add(id(thing))
            yield path, thing.detach()
            return
        items: list[tuple[Any, Any]] = []
        if isinstance(thing, dict):
            items = [(real.get(id(key), key), value) for key, value in list(thing.items())]
        elif isinstance(thing, list | tuple):
            items = list(enumerate(thing))
        elif _is_own_object(thing):
            items = [(_Attribute(name), value) for name, value in vars(thing).items()]
        if items:
            seen.add(id(thing))
        for key, value in items:
            yield from walk(value, (*path, key))

    return walk(optimizer, ())


def _found(thing: Any, path: _Path) -> Any:
    """Return what is at a place in an optimizer, or None if there is nothing (yet)."""
    for key in path:
        try:
            thing = vars(thing)[key] if isinstance(key, _Attribute) else thing[key]
        except (KeyError, IndexError, TypeError):
            return None
    return thing
