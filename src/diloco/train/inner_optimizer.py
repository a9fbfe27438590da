"""The inner optimizer that settings name, over the parameters of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from diloco.algorithm.muon import Muon, hidden_matrices, muon
from diloco.errors import ConfigurationError, nearest
from diloco.train.settings import InnerSettings

__all__ = ["inner_optimizer_in_words", "make_inner_optimizer"]

UNFIT = {"LBFGS": "evaluates the loss several times a step", "SparseAdam": "takes sparse gradients only"}
"""Classes of torch.optim that no step of one forward and one dense backward can drive, and why."""

UNFIT_ON_SHARDS = ("Adafactor", "Muon", "Rprop")
"""Optimizers whose step there is not for DTensors."""

FUSED_ON_SHARDS = ("Adam", "AdamW")
"""Classes of torch.optim whose fused kernel torch has for DTensors."""

Parameters = Mapping[str, inspect.Parameter]


def make_inner_optimizer(settings: InnerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The ``torch.optim`` class that ``settings`` names, or our own `muon`, over the trainable parameters of ``model``.

    Weight decay, asked for or the class's own default, acts on matrices only, not on norms and biases. The fused kernel
    is used where the class has one. Groups with an ``lr_ratio`` train at that many times the scheduled learning rate.

    Raises:
        ConfigurationError: for an unknown class or argument; it names the nearest. For a class that needs more than one
            dense gradient a step, or whole parameters where the model is sharded.
    """
    name, sharded = settings.name, any(hasattr(parameter, "to_local") for parameter in model.parameters())
    make, accepted = _constructor(name)
    if sharded and name in UNFIT_ON_SHARDS:
        raise ConfigurationError(
            f"inner.name={name!r} can't step parameters that are sharded over ranks. Use AdamW or SGD, or ranks that "
            "hold all parameters (ddp). Nothing was started."
        )
    arguments = dict(settings.arguments)
    for argument in arguments:
        if argument == "lr":
            raise ConfigurationError(
                "inner.arguments.lr was given. The schedule starts from inner.learning_rate: set that instead. "
                "Nothing was started."
            )
        if argument not in accepted:
            raise ConfigurationError(
                f"inner.arguments.{argument} is no argument of {name}; {nearest(argument, accepted)} "
                "Nothing was started."
            )
    may_fuse = "fused" in accepted and (name in FUSED_ON_SHARDS or not sharded)
    if arguments.get("fused") and not may_fuse:
        raise ConfigurationError(
            f"inner.arguments.fused was given to {name}, whose fused kernel takes no parameters that are sharded over "
            "ranks. Leave it out. Nothing was started."
        )
    if may_fuse and not {"fused", "foreach"} & arguments.keys():
        arguments["fused"] = True
    decays = "weight_decay" in accepted and arguments.get("weight_decay", accepted["weight_decay"].default) != 0
    try:
        return make(model if name == "Muon" else _groups(model, decays=decays), lr=settings.learning_rate, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"torch.optim.{name} refused {arguments}: {error}. Nothing was started.") from error


def inner_optimizer_in_words(settings: InnerSettings, model: nn.Module) -> str:
    """Which optimizer trains what, where there is more than one; else ""."""
    if settings.name != "Muon":
        return ""
    hidden = hidden_matrices(model, settings.arguments.get("adamw", ()))
    values = sum(parameter.numel() for parameter in hidden.values())
    rest = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) - values
    return f"Muon for {len(hidden)} hidden matrices ({values:,} values), AdamW for {rest:,} others"


def _constructor(name: str) -> tuple[Callable[..., torch.optim.Optimizer], Parameters]:
    """What makes the optimizer ``name``, and the arguments that it takes beside parameters and learning rate."""
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        key: value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    known["Muon"] = muon  # torch's own takes nothing but matrices
    if name in UNFIT:
        raise ConfigurationError(f"inner.name={name!r} {UNFIT[name]}. Use AdamW or SGD. Nothing was started.")
    if name not in known:
        raise ConfigurationError(
            f"inner.name={name!r} is no optimizer of torch.optim; {nearest(name, known.keys() - UNFIT.keys())} "
            "Nothing was started."
        )
    accepted = dict(inspect.signature(known[name]).parameters)
    if name == "Muon":
        accepted |= inspect.signature(Muon).parameters
    return known[name], {key: accepted[key] for key in accepted.keys() - {"params", "lr", "model", "arguments"}}


def _groups(model: nn.Module, *, decays: bool) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not decays:
        return [{"params": parameters}]
    vectors = {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0}
    matrices = {"params": [parameter for parameter in parameters if parameter.dim() >= 2]}
    return [group for group in (matrices, vectors) if group["params"]]
