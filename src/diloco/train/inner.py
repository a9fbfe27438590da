"""The inner loop of one replica: forward, backward, clip and step, with autocast and gradient scaling.

If a replica has several ranks, each of them has an `InnerLoop`, and all take the same steps. The optimizer is a class
of torch.optim, Muon, or the user's own.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from diloco.algorithm import (
    ValueSchedule,
    load_optimizer_state,
    local_shard,
    muon,
    slots_on_host,
    trainable_parameters,
)
from diloco.devices import Precision, to_device
from diloco.errors import ConfigurationError, NonFiniteError, nearest
from diloco.model import documents_of
from diloco.plugins import check_switches, find, is_own, takes
from diloco.train.parallel import AUTOCAST, ParallelModel
from diloco.train.settings import OptimizerSettings
from diloco.transport import ReplicaGroup


@dataclass(frozen=True)
class InnerStep:
    """The result of one inner step."""

    learning_rate: float  # the rate of this step
    gradient_norm: float  # global norm before clipping; infinite or NaN if the scaler skipped the step
    skipped: bool  # by the gradient scaler (float16 only), or because the other replicas were lost


def inner_learning_rate(settings: OptimizerSettings, steps: int) -> ValueSchedule:
    """Return the inner learning rate as a pure function of the global step, for a run of ``steps``.

    ``wsd`` decays over the last fifth of the run, or what the warm-up leaves of it.
    """
    kind, decay_steps = settings.schedule, 0
    if kind == "wsd":
        decay_steps = min(max(1, steps // 5), steps - settings.warmup_steps)
        kind = "wsd" if decay_steps else "constant"
    return ValueSchedule(
        peak=settings.learning_rate,
        kind=kind,
        total_steps=steps,
        warmup_steps=settings.warmup_steps,
        final_ratio=settings.final_ratio,
        decay_steps=decay_steps,
    )


class InnerLoop:
    """Forward, backward and step of one replica, or of one of its ranks.

    Args:
        model: from `parallelise`, or a `ParallelModel` if the replica has one rank.
        clip_norm: the largest global gradient norm, or None for no clipping.
        precision: the autocast type of the forward pass. float16 scales the loss, for the inner optimizer only.
        accumulation: the number of pieces in which a batch is computed, as even as its size allows. A rank with fewer
            sequences uses fewer pieces.
        end_of_document: the token that ends a document, to mask attention between documents;
            `diloco.model.loss.ENDS` if the targets mark the ends; None for no masks.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        learning_rate: ValueSchedule,
        clip_norm: float | None = 1.0,
        precision: Precision = "float32",
        accumulation: int = 1,
        end_of_document: int | None = None,
    ) -> None:
        self.parallel = model
        self.model = model.model
        self.parameters = trainable_parameters(self.model)
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.clip_norm = clip_norm
        self.accumulation = accumulation
        self.end_of_document = end_of_document
        self.device = next(self.model.parameters()).device
        self.autocast_dtype = AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "float16")
        self.counted = 1.0  # the fraction of the last batch's tokens that have a target which counts
        self._norm = torch.zeros((), dtype=torch.float32, device=self.device)
        fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        # Whether the optimizer's kernel can skip a step with non-finite gradients by itself. A scaler skips in its own
        # way, and a shard does not see the gradients of the others.
        self.can_mask = fused and not self.scaler.is_enabled() and model.num_shards == 1
        # on CUDA it does, so that the host need not wait for the norm before the step
        self.masked = self.can_mask and self.device.type == "cuda"

    def accumulate_gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of the replica's batch, ``(batch, sequence)`` int64 each, to ``.grad``.

        Every rank receives the whole batch and computes its own rows. All targets that count weigh the same, however
        many of them a rank or a piece has.

        Returns:
            The mean cross-entropy of the whole batch in nats per token that counts, ``()`` float32 on the device.
        """
        self.model.train()
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        group, batch_size = self.parallel.group, len(tokens)
        rows = group.rows(batch_size)
        pieces = min(self.accumulation, batch_size // group.size)  # fewer if a rank has fewer rows
        counts = targets.numpy() >= 0  # torch would wait for all its threads, 20 ms at worst, for 65,536 values
        counted = int(counts.sum())
        self.counted = counted / targets.numel()
        shares = [to_device(share[rows], self.device).tensor_split(pieces) for share in (tokens, targets)]
        of_pieces = zip(*shares, np.array_split(counts[rows], pieces), strict=True)
        for number, (piece_tokens, piece_targets, piece_counts) in enumerate(of_pieces, 1):
            # the mean of the ranks' gradients ignores how many targets each rank has, so the divisor corrects for it
            mine = int(piece_counts.sum()) * group.size
            divisor = counted / mine if mine else math.inf
            documents = documents_of(piece_tokens, piece_targets, self.end_of_document)
            with group.watched(), self.parallel.piece(last=number == pieces):
                with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                    loss, cross_entropy = self.parallel.loss(piece_tokens, piece_targets, documents)
                torch.autograd.backward(self.scaler.scale(loss / divisor))
            total += cross_entropy.detach() / divisor
        return group.gather(total).mean()

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, once per step and before `apply`. Only float16 has a loss scale."""
        with self.parallel.group.watched():
            self.scaler.unscale_(self.optimizer)

    def apply(self, step: int, *, skip: bool = False) -> InnerStep:
        """Clip, step the optimizer with the learning rate of ``step`` (counted from 0), and clear the gradients.

        With ``skip``, because another replica had to or the others are lost, only the loss scale is lowered, as there.
        Gradients that are not finite are a `NonFiniteError` unless a scaler skips the step.
        """
        return self.end(step, float(self.begin(step, skip=skip)), skip=skip)

    def begin(self, step: int, *, skip: bool = False) -> Tensor:
        """Run the first half of `apply`: everything that can be queued on the device without waiting for it.

        Returns the global gradient norm before clipping, ``()`` float32 on the device. Pass its value to `end`.
        """
        learning_rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        gradients = [local_shard(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm(gradients).to(self.device)  # torch's 0 is on the CPU if there are none
        self._norm = self.parallel.total_norm(norm)
        if self.masked and not skip:
            self._clip()
            # this is how `GradScaler.step` makes a fused kernel leave everything unchanged
            self.optimizer.found_inf = (~torch.isfinite(self._norm)).float()  # type: ignore[attr-defined]  # torch's own way
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.found_inf  # type: ignore[attr-defined]  # see above
        return self._norm

    def end(self, step: int, norm: float, *, skip: bool = False) -> InnerStep:
        """Run the second half of `apply`. ``norm`` is the value that `begin` returned."""
        finite = math.isfinite(norm)
        if not finite and not self.scaler.is_enabled():
            raise NonFiniteError(
                f"The gradient norm of inner step {step + 1} is {norm}. Nothing was applied or sent. Resume from the "
                "last checkpoint or restart the run, with a lower learning rate, a smaller clip_norm or more precision."
            )
        if finite and not skip:
            if not self.masked:
                self._clip()
                # not `scaler.step`, which would skip on this replica alone if its own gradients were not finite but
                # their mean over replicas is
                self.optimizer.step()
            self.scaler.update()
        elif self.scaler.is_enabled():  # as `update` does after an infinite gradient, even one of another replica
            self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
            self.scaler.load_state_dict({**self.scaler.state_dict(), "_growth_tracker": 0})
        self.optimizer.zero_grad(set_to_none=True)
        return InnerStep(self.learning_rate(step), norm, skipped=skip or not finite)

    def _clip(self) -> None:
        if self.clip_norm is not None:
            clip_grads_with_norm_(self.model.parameters(), self.clip_norm, self._norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and the gradient scaler."""
        optimizer, scaler = self.optimizer.state_dict(), self.scaler.state_dict()
        return {"optimizer": optimizer, "on_host": slots_on_host(self.optimizer), "scaler": scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of what `state_dict` returned."""
        copied = copy.deepcopy(dict(state["optimizer"]))  # the optimizer would share the tensors
        load_optimizer_state(self.optimizer, copied, on_host=state["on_host"])
        self.scaler.load_state_dict(dict(state["scaler"]))


UNFIT = ("Optimizer", "LBFGS", "SparseAdam")  # they need several losses a step, or sparse gradients

UNFIT_ON_SHARDS = ("Adafactor", "Rprop")  # optimizers without a step for DTensors
FUSED_ON_SHARDS = ("Adam", "AdamW", "Muon")  # optimizers with a fused kernel for DTensors


def make_inner_optimizer(
    settings: OptimizerSettings, model: nn.Module, group: ReplicaGroup | None = None, *, compiled: bool = False
) -> torch.optim.Optimizer:
    """Construct the optimizer that ``settings`` names, for the parameters of ``model``.

    A class of ``torch.optim`` is called with parameter groups. Anything else (`muon`, or the user's own code) is called
    with ``model`` if it has an argument of that name, and with parameter groups otherwise. Weight decay, whether given
    or the default of the class, applies to matrices only, not to norms and biases. The fused kernel of ``torch.optim``
    is used if there is one. Groups with an ``lr_ratio`` train at that multiple of the scheduled learning rate. The
    ranks of ``group`` share the work of Muon, whose iteration may be ``compiled``.

    Raises:
        ConfigurationError: if the class or an argument is unknown or refused, or can't step a sharded model.
    """
    name, sharded = settings.name, any(hasattr(parameter, "to_local") for parameter in model.parameters())
    make = _constructor(name)
    if sharded and name in UNFIT_ON_SHARDS:
        raise ConfigurationError(
            f"optimizer.name={name!r} can't step parameters that are sharded over ranks. Use AdamW or SGD, or ranks "
            "that hold all parameters (ddp)."
        )
    check_switches("optimizer.arguments", make, settings.arguments)
    accepted, arguments = inspect.signature(make).parameters, dict(settings.arguments)
    fuses = make is muon or ("fused" in accepted and not is_own(name))  # `muon` passes it on to AdamW
    may_fuse = fuses and (name in FUSED_ON_SHARDS or not sharded)
    if may_fuse and not {"fused", "foreach"} & arguments.keys():
        arguments["fused"] = True
    decays = "weight_decay" in accepted and arguments.get("weight_decay", accepted["weight_decay"].default) != 0
    if make is muon:
        arguments = {"compile": compiled, **arguments, "ranks": group}
    trained = model if takes(make, "model") else _groups(model, decays=decays)
    try:
        optimizer = _uncompiled(make)(trained, lr=settings.learning_rate, **arguments)
    except ConfigurationError:
        raise
    except Exception as error:
        shown = name if is_own(name) else f"torch.optim.{name}"
        if make is muon:
            shown = "diloco.muon"
        raise ConfigurationError(f"{shown} refused {settings.arguments}: {type(error).__name__}: {error}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer.name={name} returned a {type(optimizer).__name__} instead of a torch.optim.Optimizer."
        )
    if not {"state", "param_groups"} <= (saved := optimizer.state_dict()).keys():
        raise ConfigurationError(
            f"optimizer.name={name}: its state_dict() returned {', '.join(map(str, saved)) or 'nothing'}. Checkpoints "
            "need the 'state' of each parameter and the 'param_groups', as torch.optim.Optimizer returns them; other "
            "entries may be beside them."
        )
    if callable(train := getattr(optimizer, "train", None)):  # schedule-free ones step in this mode only
        train()
    return optimizer


def check_inner_arguments(settings: OptimizerSettings) -> None:
    """Raise `ConfigurationError` if the class is unknown or refuses the arguments, before there is a model."""
    # code of the user's that takes a model may need more of it than these layers
    if not is_own(settings.name) or not takes(_constructor(settings.name), "model"):
        make_inner_optimizer(settings, nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 8), nn.Linear(8, 4)))


def _constructor(name: str) -> Callable[..., torch.optim.Optimizer]:
    if is_own(name):
        make: Callable[..., torch.optim.Optimizer] = find("optimizer.name", name, torch.optim.Optimizer)
        return make
    if name == "Muon":
        return muon
    known = getattr(torch.optim, name, None)
    if not (inspect.isclass(known) and issubclass(known, torch.optim.Optimizer)) or name in UNFIT:
        names = [other for other, kind in vars(torch.optim).items() if inspect.isclass(kind) and other not in UNFIT]
        raise ConfigurationError(
            f"optimizer.name={name!r} is not an optimizer of torch.optim that can be used; {nearest(name, names)} Name "
            "your own as module:Class or FILE.py:Class."
        )
    return known


def _uncompiled(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a class of torch.optim without its graph breaks: the first would import ``torch._dynamo`` (70 MB, 1 s)."""
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
