"""The inner optimizer of one replica: forward, backward, clip, step; autocast and gradient scaling.

Where a replica has several ranks, each of them has an `InnerLoop`, and all of them take the same steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from diloco.algorithm.fragments import local_shard
from diloco.algorithm.numbers import ValueSchedule
from diloco.devices import to_device
from diloco.errors import NonFiniteError
from diloco.model.language_model import documents_of
from diloco.train.parallel import ParallelModel
from diloco.train.settings import InnerSettings

__all__ = ["InnerLoop", "InnerStep", "inner_learning_rate"]

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class InnerStep:
    """What one inner step did."""

    learning_rate: float  # of this step
    gradient_norm: float  # global norm before clipping; infinite or NaN when the step was skipped
    skipped: bool  # whether it was: by the gradient scaler (float16 only), or as the others were lost


def inner_learning_rate(settings: InnerSettings, steps: int) -> ValueSchedule:
    """The inner learning rate as a pure function of the global step, over a run of ``steps``.

    ``wsd`` with no steps of decay, as where the warm-up is as long as the run, stays at the peak.
    """
    decay_steps = settings.decay_over(steps)
    return ValueSchedule(
        peak=settings.learning_rate,
        kind="constant" if settings.schedule == "wsd" and decay_steps == 0 else settings.schedule,
        total_steps=steps,
        warmup_steps=settings.warmup_steps,
        final_ratio=settings.final_ratio,
        decay_steps=decay_steps,
    )


class InnerLoop:
    """Forward, backward and step of one replica, or of one of its ranks.

    Args:
        model: made by `parallelise`, or a `ParallelModel` where the replica has one rank.
        optimizer: over its trainable parameters.
        learning_rate: of the global step.
        clip_norm: largest global gradient norm, or None.
        precision: autocast type of the forward pass; float16 scales the loss, for the inner optimizer only.
        accumulation: pieces a batch is computed in, as even as its size allows; fewer where a rank has fewer sequences.
        end_of_document: the token that ends a document, where documents in a sequence must not see each other;
            `diloco.model.loss.ENDS` where the targets say it.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        *,
        learning_rate: ValueSchedule,
        clip_norm: float | None = 1.0,
        precision: Literal["float32", "bfloat16", "float16"] = "float32",
        accumulation: int = 1,
        end_of_document: int | None = None,
    ) -> None:
        self.parallel = model
        self.model = model.model
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.clip_norm = clip_norm
        self.accumulation = accumulation
        self.end_of_document = end_of_document
        self.device = next(self.model.parameters()).device
        self.autocast_dtype = AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "float16")
        self.counted = 1.0  # of the last batch, the fraction of its tokens that have a target which counts
        self._norm = torch.zeros((), device=self.device)
        fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        # a scaler skips in its own way, and a shard does not see the others' gradients
        # whether the optimizer's kernel can skip a step by itself, where the gradients are not finite
        self.can_mask = fused and not self.scaler.is_enabled() and model.num_shards == 1
        # whether it does, so that the host need not look at them first: on CUDA, where it can
        self.masked = self.can_mask and self.device.type == "cuda"

    def accumulate_gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of the replica's batch, ``(batch, sequence)`` int64 each, to ``.grad``.

        Every rank is given the whole batch and computes its rows of it. All targets that count weigh the same, however
        many of them a rank or a piece has.

        Returns:
            Mean cross-entropy of the whole batch in nats per token that counts, ``()`` float32 on the device.

        Raises:
            ConfigurationError: if the batch has fewer sequences than the replica has ranks.
            ReplicaLostError: if another rank of the replica is gone.
        """
        self.model.train()
        total = torch.zeros((), device=self.device)
        group, batch_size = self.parallel.group, len(tokens)
        rows = group.rows(batch_size)
        pieces = self.parallel.pieces(batch_size, self.accumulation)
        counts = [int((piece >= 0).sum()) for piece in targets[rows].tensor_split(pieces)]
        counted = int((targets >= 0).sum())
        self.counted = counted / targets.numel()
        shares = [to_device(share[rows], self.device).tensor_split(pieces) for share in (tokens, targets)]
        for number, (piece_tokens, piece_targets) in enumerate(zip(*shares, strict=True), 1):
            # ranks take the mean of their gradients, whatever rows they are of
            mine = counts[number - 1] * group.size
            divisor = counted / mine if mine else math.inf
            documents = documents_of(piece_tokens, piece_targets, self.end_of_document)
            with group.watched(), self.parallel.piece(last=number == pieces):
                with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                    loss, cross_entropy = self.parallel.loss(piece_tokens, piece_targets, documents)
                torch.autograd.backward(self.scaler.scale(loss / divisor))
            total += cross_entropy.detach() / divisor
        return group.gather(total).mean()

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, once a step, before `apply`; does nothing but in float16."""
        with self.parallel.group.watched():
            self.scaler.unscale_(self.optimizer)

    def apply(self, step: int, *, skip: bool = False) -> InnerStep:
        """Clip, step the optimizer with the learning rate of ``step`` (counted from 0), and clear the gradients.

        `begin` and `end` in one, for a single replica; it waits for the device once.

        Args:
            step: inner steps finished before this one.
            skip: skip the step because another replica had to, or the others are lost; lower a loss scale as it did.

        Raises:
            NonFiniteError: if the gradients are not finite and no scaler is there to skip the step.
        """
        return self.end(step, float(self.begin(step, skip=skip)), skip=skip)

    def begin(self, step: int, *, skip: bool = False) -> Tensor:
        """The first half of `apply`: everything that can be handed to the device without waiting for it.

        Returns:
            The global gradient norm before clipping, ``()`` float32 on the device; `end` takes its value.
        """
        learning_rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        gradients = [local_shard(p.grad) for p in self.model.parameters() if p.grad is not None]
        self._norm = self.parallel.total_norm(get_total_norm(gradients))
        if self.masked and not skip:
            self._clip()
            # how `GradScaler.step` tells a fused kernel to leave everything as it is
            self.optimizer.found_inf = (~torch.isfinite(self._norm)).float()  # type: ignore[attr-defined]  # torch's own way
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.found_inf  # type: ignore[attr-defined]  # see above
        return self._norm

    def end(self, step: int, norm: float, *, skip: bool = False) -> InnerStep:
        """The second half of `apply`, with the value of what `begin` returned; the rest as there."""
        finite = math.isfinite(norm)
        if not finite and not self.scaler.is_enabled():
            raise NonFiniteError(
                f"the gradient norm of inner step {step + 1} is {norm}. Nothing was applied or sent. Go on from the "
                "last checkpoint, or begin anew, with a lower learning rate, inner.clip_norm, or a wider precision."
            )
        if finite and not skip:
            if not self.masked:
                self._clip()
                # not `scaler.step`: where only this replica's gradients were not finite but the replicas' mean is,
                # it would skip while the others move
                self.optimizer.step()
            self.scaler.update()
        elif self.scaler.is_enabled():
            self._lower_scale()
        self.optimizer.zero_grad(set_to_none=True)
        return InnerStep(self.learning_rate(step), norm, skipped=skip or not finite)

    def _clip(self) -> None:
        if self.clip_norm is not None:
            clip_grads_with_norm_(self.model.parameters(), self.clip_norm, self._norm)

    def _lower_scale(self) -> None:
        """As `GradScaler.update` after an infinite gradient, whether or not it was this replica's."""
        self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
        self.scaler.load_state_dict({**self.scaler.state_dict(), "_growth_tracker": 0})

    def state_dict(self) -> dict[str, Any]:
        """Inner optimizer and gradient scaler."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, by copy."""
        self.optimizer.load_state_dict(copy.deepcopy(dict(state["optimizer"])))  # torch's own would share the tensors
        self.scaler.load_state_dict(dict(state["scaler"]))
