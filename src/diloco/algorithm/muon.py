"""An inner optimizer with Muon for hidden matrices and AdamW for all other parameters (MuLoCo, 2505.23725).

Matrices are orthogonalised by the Newton-Schulz iteration, on one rank or shared by several.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from diloco.algorithm.checks import check_number, check_whole
from diloco.algorithm.partition import trainable_parameters
from diloco.algorithm.tensors import local_shard
from diloco.errors import ConfigurationError

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # isotropic.py relies on their bounds
_LEAST_SIDE = 64  # for smaller matrices bfloat16 costs more than it gains
_BATCH_VALUES = 1 << 24  # the most values that a rank orthogonalises together, which bounds the scratch memory


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon``, with matrices of equal shape orthogonalised together, and AdamW for all other groups.

    Use `muon` to make it from a model. For a matrix with gradient G in a group with ``orthogonalise``, where O is
    `newton_schulz`::

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
        momentum: That of orthogonalised matrices; ``nesterov`` too. For ``newton_schulz_steps`` see `newton_schulz`.
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
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            check_number(f"Muon's {name}", value, ge=0)
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
    weight_decay: float = 0.1,
    ranks: Ranks | None = None,
    **arguments: Any,
) -> Muon:
    """Return a `Muon` that orthogonalises the hidden matrices of ``model`` and trains the rest with AdamW.

    Norms, biases and other vectors have no weight decay. For hidden matrices see `hidden_matrices`.

    Args:
        model: Any module.
        lr: The learning rate of AdamW.
        matrix_lr_ratio: The learning rate of hidden matrices as a multiple of ``lr``.
        weight_decay: The decoupled weight decay of all matrices.
        ranks: The ranks that share the work, as in `Muon`; with FSDP2 or DDP a `diloco.transport.ReplicaGroup`.
        arguments: Further arguments of `Muon`.

    Raises:
        ConfigurationError: if there is no hidden matrix, or matrices are sharded over other ranks than ``ranks``.

    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 50, bias=False))
    >>> optimizer = muon(model, lr=1e-3)
    >>> [(group["orthogonalise"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [(True, 0.01, 2), (False, 0.001, 2), (False, 0.001, 2)]
    """
    check_number("Muon's matrix_lr_ratio", matrix_lr_ratio, gt=0)
    hidden = list(hidden_matrices(model).values())
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


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of all trainable matrices except embeddings and output heads.

    A head is a linear layer whose weight has the shape of an embedding, (entries, width). If more linear layers than
    embeddings have that shape, none of them counts as a head: in a model with as many learned positions as channels,
    the hidden matrices have it.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(weight) for weight in tables}
    for shape in {weight.shape for weight in tables}:
        heads = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == shape]
        if len(heads) <= sum(weight.shape == shape for weight in tables):
            apart |= {id(weight) for weight in heads}
    return {name: p for name, p in trainable_parameters(model).items() if p.dim() == 2 and id(p) not in apart}


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return approximately ``U V^T`` for each matrix ``U S V^T``, by the quintic Newton-Schulz iteration.

    The singular values of the result are near 1. With ``X = G / |G|_F``, transposed if it has more rows than columns,
    ``steps`` times::

        A = X X^T;   X <- 3.4445 X + (-4.7750 A + 2.0315 A^2) X

    Args:
        matrices: ``(n, rows, columns)``, left unchanged. The computation uses their type. `Muon` takes bfloat16 on
            CUDA, and on CPUs that multiply it in hardware (AMX) for matrices of at least 64 x 64; otherwise float32.
        steps: The number of iterations.

    Returns:
        ``(n, rows, columns)``. A matrix of zeros gives zeros.

    >>> made = newton_schulz(torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0)))
    >>> bool((torch.linalg.svdvals(made) - 1).abs().max() < 0.35)
    True
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    working = matrices.mT if tall else matrices
    working = working / working.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = working @ working.mT
        working = torch.baddbmm(working, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), working, beta=a)
    return working.mT if tall else working


def _working_type(shape: torch.Size, device: torch.device) -> torch.dtype:
    fast = device.type == "cuda" or (min(shape) >= _LEAST_SIDE and _multiplies_bfloat16(device.type))
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def _multiplies_bfloat16(device: str) -> bool:
    """Return whether the device is a CPU that multiplies bfloat16 matrices in hardware, much faster than float32."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer versions of torch
    return device == "cpu" and bool(capabilities.get("amx_bf16"))


class Ranks(Protocol):
    """S ranks that hold shards, or copies, of the same matrices; `diloco.transport.ReplicaGroup` is one.

    Each method begins a transfer and returns a function that waits for it. All ranks begin the same ones in order.
    """

    size: int  # S
    position: int  # of this rank

    def begin_gather(self, value: Tensor, /) -> Callable[[], Tensor]:
        """Give ``value`` to all ranks and get ``(size, ...)``, the values of all."""
        ...

    def begin_exchange(self, values: Tensor, sends: Sequence[int], receives: Sequence[int], /) -> Callable[[], Tensor]:
        """Send the next ``sends[s]`` of ``values``, ``(n,)``, to each rank s, and get ``receives[s]`` from each."""
        ...


class Alone:
    """A lone rank, which transfers nothing."""

    size, position = 1, 0

    def begin_gather(self, value: Tensor, /) -> Callable[[], Tensor]:
        return lambda: value.unsqueeze(0)

    def begin_exchange(self, values: Tensor, sends: Sequence[int], receives: Sequence[int], /) -> Callable[[], Tensor]:
        return lambda: values


def orthogonalised_by(
    ranks: Ranks, matrices: Sequence[tuple[Tensor, Tensor]], iterate: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Orthogonalise the updates of ``matrices``, each by one of ``ranks``, and equal ones together.

    The shards of a sharded update travel to that rank and those of the result back; the result of a whole one travels
    to all. Transfers overlap with the work on other matrices and have the type of the iteration. The k-th matrix, in
    order of shapes, belongs to rank k modulo S.

    Args:
        matrices: Pairs of a parameter and its update, ``(rows, columns)``, the same on all ranks. If the parameter is a
            DTensor, sharded by rows over ``ranks``, the update is this rank's shard.
        iterate: `newton_schulz`.

    Yields:
        Each parameter with its result, or this rank's shard of it, in the type of the iteration.
    """
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for parameter, update in matrices:
        key = parameter.shape, hasattr(parameter, "to_local"), parameter.device, parameter.dtype
        alike.setdefault(key, []).append((parameter, update))
    batches = _batches(ranks, alike.values())
    previous, current = None, next(batches, None)
    while current is not None:
        # while one batch is orthogonalised, the next is gathered and the results of the previous one travel
        following = next(batches, None)
        current.orthogonalise(iterate)
        if previous is not None:
            yield from previous.results()
        previous, current = current, following
    if previous is not None:
        yield from previous.results()


def _batches(ranks: Ranks, alike: Collection[Sequence[tuple[Tensor, Tensor]]]) -> Iterator[_Batch]:
    first = 0
    for matrices in alike:
        at_once = ranks.size * max(1, _BATCH_VALUES // matrices[0][0].numel())
        for start in range(0, len(matrices), at_once):
            batch = matrices[start : start + at_once]
            yield _Batch(ranks, [batch[(rank - first) % ranks.size :: ranks.size] for rank in range(ranks.size)])
            first += len(batch)


class _Batch:
    """Matrices of one shape on the way to the ranks that orthogonalise them, and back.

    Args:
        matrices: For each rank, the parameters and updates that it orthogonalises.
    """

    def __init__(self, ranks: Ranks, matrices: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        self.ranks = ranks
        self.matrices = matrices
        mine = [update for _, update in matrices[ranks.position]]
        parameter, update = next(pairs[0] for pairs in matrices if pairs)
        self.shape = parameter.shape
        self.sharded = hasattr(parameter, "to_local")
        working = _working_type(self.shape, update.device)
        if self.sharded:
            rows, each = self.shape[0], -(-self.shape[0] // ranks.size)  # as FSDP2 divides rows
            self.rows = [min(each, max(0, rows - rank * each)) for rank in range(ranks.size)]
            self.sends = [len(pairs) * update.numel() for pairs in matrices]
            self.receives = [len(mine) * share * self.shape[1] for share in self.rows]
            values = torch.cat([update.reshape(-1).to(working) for pairs in matrices for _, update in pairs])
            self._wait = ranks.begin_exchange(values, self.sends, self.receives)
        else:
            whole = torch.stack(mine).to(working) if mine else update.new_empty((0, *self.shape), dtype=working)
            self._wait = lambda: whole

    def orthogonalise(self, iterate: Callable[[Tensor], Tensor]) -> None:
        """Wait for this rank's matrices, orthogonalise them, and begin to send the results."""
        matrices, count = self._wait(), len(self.matrices[self.ranks.position])
        if self.sharded:
            shares = zip(torch.split(matrices, self.receives), self.rows, strict=True)
            matrices = torch.cat([share.view(count, rows, self.shape[1]) for share, rows in shares], dim=1)
        results = iterate(matrices) if count else matrices
        if self.sharded:
            values = torch.cat([share.reshape(-1) for share in torch.split(results, self.rows, dim=1)])
            self._wait = self.ranks.begin_exchange(values, self.receives, self.sends)
        else:
            room = max(map(len, self.matrices)) - count
            padded = torch.cat([results, results.new_empty((room, *self.shape))]) if room else results
            self._wait = self.ranks.begin_gather(padded)

    def results(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for the results and yield each parameter with its own, or this rank's shard of it."""
        arrived = self._wait()
        blocks = torch.split(arrived, self.sends) if self.sharded else arrived.unbind()
        for pairs, block in zip(self.matrices, blocks, strict=True):
            for number, (parameter, update) in enumerate(pairs):
                yield parameter, block.view(-1 if update.numel() else len(pairs), *update.shape)[number]
