"""Builds the inner optimizer that settings name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from diloco.algorithm import INNER_OPTIMIZERS, Muon, hidden_matrices, trainable_parameters
from diloco.errors import ConfigurationError, nearest
from diloco.plugins import check_arguments, find, is_own, split, takes
from diloco.train.settings import OptimizerSettings

__all__ = ["check_inner_arguments", "inner_optimizer_in_words", "make_inner_optimizer"]

UNFIT = {"LBFGS": "evaluates the loss several times a step", "SparseAdam": "takes sparse gradients only"}
"""Classes of torch.optim that can't work with one forward and one dense backward pass per step, and the reason."""

UNFIT_ON_SHARDS = ("Adafactor", "Muon", "Rprop")  # optimizers without a step for DTensors
FUSED_ON_SHARDS = ("Adam", "AdamW")  # classes of torch.optim with a fused kernel for DTensors

Parameters = Mapping[str, inspect.Parameter]


def make_inner_optimizer(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Construct the optimizer that ``settings`` names, for the parameters of ``model``.

    A class of ``torch.optim`` is called with parameter groups. Anything else (`muon`, or the user's own code) is called
    with ``model`` if it has an argument of that name, and with parameter groups otherwise. Weight decay, whether given
    or the default of the class, applies to matrices only, not to norms and biases. The fused kernel of ``torch.optim``
    is used if there is one. Groups with an ``lr_ratio`` train at that multiple of the scheduled learning rate.

    Raises:
        ConfigurationError: if the class or an argument is unknown, with the nearest known name; if the class needs more
            than one dense gradient per step, or whole parameters while the model is sharded.
    """
    name, sharded = settings.name, any(hasattr(parameter, "to_local") for parameter in model.parameters())
    make, accepted = check_inner_arguments(settings)
    if sharded and name in UNFIT_ON_SHARDS:
        raise ConfigurationError(
            f"optimizer.name={name!r} can't step parameters that are sharded over ranks. Use AdamW or SGD, or ranks "
            "that hold all parameters (ddp)."
        )
    arguments = dict(settings.arguments)
    may_fuse = "fused" in accepted and not is_own(name) and (name in FUSED_ON_SHARDS or not sharded)
    if arguments.get("fused") and not may_fuse and not is_own(name):
        raise ConfigurationError(
            f"optimizer.arguments.fused can't be used here: the fused kernel of {name} does not support parameters "
            "that are sharded over ranks. Leave it out."
        )
    if may_fuse and not {"fused", "foreach"} & arguments.keys():
        arguments["fused"] = True
    decays = "weight_decay" in accepted and arguments.get("weight_decay", accepted["weight_decay"].default) != 0
    trained = model if "model" in inspect.signature(make).parameters else _groups(model, decays=decays)
    try:
        optimizer = _uncompiled(make)(trained, lr=settings.learning_rate, **arguments)
    except ConfigurationError:
        raise
    except Exception as error:
        shown = name if is_own(name) else f"torch.optim.{name}"
        raise ConfigurationError(f"{shown} refused {arguments}: {type(error).__name__}: {error}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer.name={name} returned a {type(optimizer).__name__} instead of a torch.optim.Optimizer."
        )
    return optimizer


def check_inner_arguments(settings: OptimizerSettings) -> tuple[Callable[..., torch.optim.Optimizer], Parameters]:
    """Return the optimizer's constructor and the arguments it accepts besides parameters and learning rate.

    Raises:
        ConfigurationError: if the class or an argument is unknown, with the nearest known name.
    """
    name = settings.name
    make, accepted = _constructor(name)
    for argument in settings.arguments:
        if argument == "lr":
            raise ConfigurationError(
                "optimizer.arguments.lr can't be set: the schedule sets the learning rate. Set optimizer.learning_rate."
            )
        if argument not in accepted and not is_own(name):
            raise ConfigurationError(
                f"optimizer.arguments.{argument} is not an argument of {name}; {nearest(argument, accepted)}"
            )
    if is_own(name):
        check_arguments("optimizer.name", name, make, settings.arguments)
    return make, accepted


def inner_optimizer_in_words(settings: OptimizerSettings, model: nn.Module) -> str:
    """Describe which optimizer trains which parameters, if there are two or it is the user's own; else return ""."""
    if is_own(settings.name):
        place, name = split(settings.name)
        return f"{name} of {place.rpartition('/')[2]}"
    if settings.name != "Muon":
        return ""
    hidden = hidden_matrices(model, settings.arguments.get("adamw", ()))
    rest = {name: p for name, p in trainable_parameters(model).items() if name not in hidden}
    return f"Muon for {_named(hidden)}; AdamW for {_named(rest)}"


def _named(parameters: Mapping[str, nn.Parameter]) -> str:
    """Count and list parameters, with one name for the same parameter of all layers.

    >>> _named({f"layers.{n}.norm.weight": nn.Parameter(torch.zeros(3)) for n in range(4)})
    '4 tensors of 12 values (layers.*.norm.weight)'
    """
    values = sum(parameter.numel() for parameter in parameters.values())
    names = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in parameters)
    return f"{len(parameters)} tensors of {values:,} values ({', '.join(names)})"


def _constructor(name: str) -> tuple[Callable[..., torch.optim.Optimizer], Parameters]:
    """Return the constructor of optimizer ``name`` and its arguments besides parameters and learning rate."""
    if is_own(name):
        make = find("optimizer.name", name, torch.optim.Optimizer)
        if not takes(make, "lr"):
            raise ConfigurationError(f"optimizer.name={name} must accept a learning rate as the argument lr.")
        return make, inspect.signature(make).parameters
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        key: value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    known |= {each: INNER_OPTIMIZERS.find(each) for each in INNER_OPTIMIZERS.names}
    if name in UNFIT:
        raise ConfigurationError(f"optimizer.name={name!r} {UNFIT[name]}. Use AdamW or SGD.")
    if name not in known:
        raise ConfigurationError(
            f"optimizer.name={name!r} is not an optimizer of torch.optim; {nearest(name, known.keys() - UNFIT.keys())} "
            "Name your own as module:Class or FILE.py:Class."
        )
    accepted = dict(inspect.signature(known[name]).parameters)
    if name == "Muon":
        accepted |= inspect.signature(Muon).parameters
    return known[name], {key: accepted[key] for key in accepted.keys() - {"params", "lr", "model", "arguments"}}


def _uncompiled(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a class of ``torch.optim`` without its graph breaks, as no optimizer step is compiled here.

    The first graph break would import ``torch._dynamo``, which takes 70 MB and a second.
    """
    if not inspect.isclass(make) or not make.__module__.startswith("torch.optim"):
        return make
    methods = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    plain = {name: inspect.unwrap(getattr(make, name)) for name in methods}
    made: Any = type(make.__name__, (make,), plain | {"step": torch.no_grad()(plain["step"])})
    return made  # type: ignore[no-any-return]  # a subclass of `make`


def _groups(model: nn.Module, *, decays: bool) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not decays:
        return [{"params": parameters}]
    vectors = {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0}
    matrices = {"params": [parameter for parameter in parameters if parameter.dim() >= 2]}
    return [group for group in (matrices, vectors) if group["params"]]
