"""An inner optimizer with Muon for hidden matrices and AdamW for all other parameters (MuLoCo, 2505.23725)."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from diloco.algorithm.checks import check_number, check_whole
from diloco.algorithm.orthogonal import Alone, Ranks, newton_schulz, orthogonalised_by
from diloco.algorithm.partition import trainable_parameters
from diloco.algorithm.tensors import local_shard
from diloco.errors import ConfigurationError


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon``, with matrices of equal shape orthogonalised together, and AdamW for all other groups.

    Use `muon` to make it from a model. For a matrix with gradient G in a group with ``orthogonalise``, where O is
    `orthogonalised`::

        B <- momentum B + G;   U = O(G + momentum B) with Nesterov, O(B) without
        theta <- theta - lr (weight_decay theta + sqrt(max(1, outputs / inputs)) U)

    A scheduler that sets ``lr`` of all groups should multiply it by each group's ``lr_ratio``.

    Each matrix is orthogonalised by one of ``ranks``. If matrices are sharded by rows (FSDP2), their shards travel to
    that rank and the shards of U back; if each rank holds all of them (DDP), U travels to all. Transfers overlap with
    the work on other matrices. U has the bits that a lone rank computes from the same gradients.

    Args:
        params: The parameter groups, with three optional keys: ``orthogonalise`` selects Muon instead of AdamW
            (default: False), ``lr_ratio`` multiplies ``lr`` (default: 1), and ``inputs_first`` means that the matrices
            have a column for each output instead of a row (default: False).
        lr: The learning rate of groups with ``lr_ratio`` 1.
        weight_decay: The decoupled weight decay of groups that do not set their own.
        momentum: That of orthogonalised matrices; ``nesterov`` too. For ``newton_schulz_steps`` see `orthogonalised`.
        betas: AdamW's; ``eps`` and ``fused`` too.
        compile: Whether `torch.compile` compiles the iteration, which changes round-off.
        ranks: Those that share the work. Sharded matrices need them.

    Raises:
        ConfigurationError: if a parameter of a group with ``orthogonalise`` is not a matrix, or is sharded otherwise
            than by rows over ``ranks``, or a value is out of range.
    """

    def __init__(
        self,
        params: Iterable[Mapping[str, Any]],
        lr: float = 4e-4,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        newton_schulz_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        compile: bool = False,  # the name of the setting and of torch's function
        ranks: Ranks | None = None,
    ) -> None:
        check_number("Muon's momentum", momentum, ge=0, lt=1)
        check_whole("Muon's newton_schulz_steps", newton_schulz_steps, 1)
        self._ranks = ranks or Alone()
        # with sizes as symbols, since each number of matrices would be compiled anew
        self._iterate = torch.compile(newton_schulz, dynamic=True) if compile else newton_schulz
        groups = [dict(group) for group in params]
        for group in groups:
            group.setdefault("lr", lr * group.setdefault("lr_ratio", 1.0))
            group.setdefault("weight_decay", weight_decay)
            if not group.setdefault("orthogonalise", False):
                continue
            group.setdefault("inputs_first", False)
            group.update(momentum=momentum, nesterov=nesterov, newton_schulz_steps=newton_schulz_steps)
            for parameter in group["params"]:
                self._check(parameter)
        self._adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        super().__init__(self._adamw.param_groups, {})
        self._share()

    def _check(self, parameter: Any) -> None:
        if parameter.dim() != 2:
            raise ConfigurationError(
                f"Muon orthogonalises matrices, but a parameter is of shape {tuple(parameter.shape)}. Use AdamW for it."
            )
        if not hasattr(parameter, "to_local"):
            return
        size, placements = parameter.device_mesh.size(), parameter.placements
        if size != self._ranks.size or len(placements) != 1 or not placements[0].is_shard(0):
            raise ConfigurationError(
                f"Muon on {self._ranks.size} ranks can't gather a matrix that is laid out as {placements} on {size}. "
                "Shard by rows over one group, as FSDP2 does, and pass muon(..., ranks=ReplicaGroup(that_group))."
            )

    def _share(self) -> None:
        # AdamW steps its own groups alone, and has its state in this optimizer's
        self._adamw.param_groups = [group for group in self.param_groups if not group["orthogonalise"]]
        self._adamw.state = self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._adamw.param_groups:
            self._adamw.step()
        for group in self.param_groups:
            if group["orthogonalise"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradients = [local_shard(parameter.grad) for parameter in parameters]
        momenta = [local_shard(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        updates = torch._foreach_add(gradients, momenta, alpha=group["momentum"]) if group["nesterov"] else momenta
        pairs = list(zip(parameters, updates, strict=True))
        iterate = functools.partial(self._iterate, steps=group["newton_schulz_steps"])
        for parameter, update in orthogonalised_by(self._ranks, pairs, iterate):
            rows, columns = reversed(parameter.shape) if group["inputs_first"] else parameter.shape
            values, step_size = local_shard(parameter), group["lr"] * math.sqrt(max(1.0, rows / columns))
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.add_(update.to(values.dtype), alpha=-step_size)


def muon(
    model: nn.Module,
    lr: float = 4e-4,
    *,
    matrix_lr_ratio: float = 10.0,
    adamw: Sequence[str] = (),
    weight_decay: float = 0.1,
    ranks: Ranks | None = None,
    **arguments: Any,
) -> Muon:
    """Return a `Muon` that orthogonalises the hidden matrices of ``model`` and trains the rest with AdamW.

    Hidden matrices are all trainable matrices except embeddings, output heads and those matched by ``adamw``. A head is
    a linear layer whose weight has the shape of an embedding, (entries, width). If more linear layers than embeddings
    have that shape, none of them counts as a head: in a model with as many learned positions as channels, the hidden
    matrices have it. Norms, biases and other vectors have no weight decay.

    Args:
        model: Any module.
        lr: The learning rate of AdamW.
        matrix_lr_ratio: The learning rate of hidden matrices as a multiple of ``lr``.
        adamw: Name patterns, such as ``*.router.weight``, of matrices that AdamW trains.
        weight_decay: The decoupled weight decay of all matrices.
        ranks: The ranks that share the work, as in `Muon`; with FSDP2 or DDP a `diloco.transport.ReplicaGroup`.
        arguments: Further arguments of `Muon`.

    Raises:
        ConfigurationError: if a pattern matches no trainable matrix, no matrix is left to orthogonalise, or matrices
            are sharded over other ranks than ``ranks``.

    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 50, bias=False))
    >>> optimizer = muon(model, lr=1e-3)
    >>> [(group["orthogonalise"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [(True, 0.01, 2), (False, 0.001, 2), (False, 0.001, 2)]
    """
    hidden = _hidden_matrices(model, adamw)
    if not hidden:
        raise ConfigurationError(
            "Muon needs hidden matrices, but this model has none besides its embeddings and head. Use AdamW."
        )
    ours = set(map(id, hidden))
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ours]
    # GPT-2's layers have transposed matrices, (inputs, outputs)
    turned = {id(module.weight) for module in model.modules() if type(module).__name__ == "Conv1D"}
    shared = {"orthogonalise": True, "lr_ratio": matrix_lr_ratio}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in hidden if id(p) not in turned], **shared},
        {"params": [p for p in hidden if id(p) in turned], **shared, "inputs_first": True},
        {"params": [p for p in others if p.dim() >= 2]},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    return Muon([group for group in groups if group["params"]], lr, weight_decay=weight_decay, ranks=ranks, **arguments)


def _hidden_matrices(model: nn.Module, adamw: Sequence[str]) -> list[nn.Parameter]:
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(weight) for weight in tables}
    for shape in {weight.shape for weight in tables}:
        heads = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == shape]
        if len(heads) <= sum(weight.shape == shape for weight in tables):
            apart |= {id(weight) for weight in heads}
    matrices = {name: p for name, p in trainable_parameters(model).items() if p.dim() == 2}
    for pattern in adamw:
        names = fnmatch.filter(matrices, pattern)
        if not names:
            raise ConfigurationError(
                f"The pattern {pattern!r} matches no trainable matrix of this model, whose matrices are "
                f"{', '.join(list(matrices)[:5])}{', ...' if len(matrices) > 5 else ''}."
            )
        apart |= {id(matrices[name]) for name in names}
    return [p for p in matrices.values() if id(p) not in apart]
