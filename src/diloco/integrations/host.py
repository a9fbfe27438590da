"""A replica whose training loop is driven by a framework, which all integrations share.

DiLoCo's state is saved next to the framework's checkpoint, in ``diloco/replica-M`` of the checkpoint folder. If
parameters are sharded, each rank saves its part in ``diloco/replica-M-rank-R-of-S``. Damaged files are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from diloco.algorithm import (
    check_choice,
    check_replica,
    content_of,
    digest_tensors,
    holding,
    load_optimizer_state,
    named_parameters,
    reshard,
)
from diloco.checkpoint import open_checkpoint, save_checkpoint
from diloco.errors import CheckpointError, ConfigurationError, TransportError
from diloco.outer import DiLoCo, averaging_wrappers, bare_optimizer, check_kinds
from diloco.state_tree import readable_state
from diloco.transport import ProcessGroupTransport, Transport, connect_process_group
from diloco.units import diff

Parameters = Literal["global", "local"]
"""Which parameters are evaluated, saved as the model, and left in the model at the end: the global ones, which are the
same on all replicas, or this replica's local ones."""

_UNFIT = {
    "DeepSpeed keeps the parameters private": ("deepspeed", "DEEPSPEED", "DeepSpeedOptimizerWrapper"),
    "Megatron shards its parameters without DTensors": ("megatron", "MEGATRON_LM", "MegatronEngine"),
    "diloco does not support torch_xla": ("XLA", "XLAStrategy", "SingleDeviceXLAStrategy"),
    "Lightning's checkpoints keep only the first rank's state of a callback": ("ModelParallelStrategy",),
}
"""Reason -> the names that it applies to: packages, classes, and Accelerate's distributed types."""


def refuse_unfit(thing: object) -> None:
    """Raise `ConfigurationError` if DiLoCo can't work with ``thing``, or with what it names if it is a text."""
    kinds = [] if isinstance(thing, str) else type(thing).__mro__
    names = {thing, *(kind.__name__ for kind in kinds), *(kind.__module__.partition(".")[0] for kind in kinds)}
    for why, unfit in _UNFIT.items():
        if names.intersection(unfit):
            raise ConfigurationError(
                f"DiLoCo can't work with {thing if isinstance(thing, str) else type(thing).__name__}: {why}. Use "
                "DistributedDataParallel, or FSDP2 with Accelerate or the Trainer of transformers."
            )


def unwrapped(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Return the module and the optimizer inside the wrappers of torch, Accelerate and Lightning.

    Raises:
        ConfigurationError: if DiLoCo can't work with one of them.
    """
    for module in model.modules():
        refuse_unfit(module)
    while (content := content_of(model)) is not None:
        model = content
    refuse_unfit(optimizer)
    optimizer = bare_optimizer(optimizer)
    refuse_unfit(optimizer)
    return model, optimizer


@contextmanager
def replica_of_each_rank(model: nn.Module) -> Iterator[Transport | None]:
    """Make each rank of torch.distributed a replica, and yield its transport.

    DistributedDataParallel then no longer averages gradients. Call it on all ranks after the framework has wrapped
    ``model``. Yield None if there is one rank, or if the ranks hold shards and so are one replica.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or _is_sharded(model):
        yield None
        return
    wrappers = averaging_wrappers(model)
    try:
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = False  # as inside no_sync(), which restores this value
        with connect_process_group() as transport:
            yield transport
    finally:
        for wrapper in wrappers:
            wrapper.require_backward_grad_sync = True


def of_one_job(diloco: DiLoCo) -> bool:
    """Return whether the ranks of one job are replicas, of which the framework saves one."""
    return isinstance(diloco.transport, ProcessGroupTransport) and not _is_sharded(diloco.model)


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "to_local") for parameter in named_parameters(model).values())


def replace_method(at_end: ExitStack, owner: Any, name: str, ours: Callable[..., None]) -> None:
    """Until ``at_end`` closes, let ``ours``, whose first argument is the method, replace a method of ``owner``."""
    setattr(owner, name, partial(ours, getattr(owner, name)))
    at_end.callback(delattr, owner, name)


class StepWatch:
    """Observes whether an optimizer takes its steps or a gradient scaler skips them.

    It observes the optimizer, since a fused kernel receives ``found_inf`` and skips the step itself, which frameworks
    count as a step taken.

    >>> parameter = nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([parameter], lr=1.0)
    >>> watch = StepWatch(optimizer)
    >>> optimizer.step()
    >>> watch.trained(), watch.trained()
    (1.0, 0.0)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.taken = False  # whether a step was taken since the last call of `trained`
        self._handle = optimizer.register_step_post_hook(self._stepped)

    def trained(self) -> float:
        """Return 1.0 if the optimizer took a step since the last call, else 0.0, as an argument for `DiLoCo.step`."""
        taken, self.taken = self.taken, False
        return float(taken)

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        self.taken = self.taken or found_inf is None or not bool(found_inf)


class HostedReplica:
    """A `DiLoCo` that is created when a framework starts to train. It can swap global parameters into the model.

    While the model holds the global parameters, it must not be trained or merged.

    Args:
        parameters: the parameters that the model holds while it is evaluated or saved, and at the end.
        arguments: further arguments of `DiLoCo`.

    Raises:
        ConfigurationError: if ``parameters`` or one of ``arguments`` can't work.
    """

    def __init__(self, parameters: Parameters, arguments: Mapping[str, Any]) -> None:
        check_choice("parameters", parameters, get_args(Parameters))
        check_kinds(arguments)
        self.parameters = parameters
        self.training = False  # whether training has started and not ended
        self.diloco: DiLoCo | None = None  # None until training starts
        self.hidden: dict[str, Tensor] | None = None  # name -> local value while the model holds the global ones
        self._arguments = arguments
        self._loaded: Mapping[str, Any] = {}  # the state to restore when training starts
        self._shown = ExitStack()
        self.at_end = ExitStack()  # closes the connection, and what an integration adds

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        transport: Transport | Callable[[], AbstractContextManager[Transport]] | None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Create the `DiLoCo` for the model and optimizer that a framework has wrapped; a callable connects first.

        ``goes_on``: whether the framework has loaded a checkpoint, so that `resume` follows.
        """
        if callable(transport):
            transport = self.at_end.enter_context(transport())
        bare, self.inner = unwrapped(model, optimizer)
        if transport is None:
            transport = self.at_end.enter_context(replica_of_each_rank(model))
        try:
            arguments = {"compare_weights": not goes_on} | dict(self._arguments)
            self.diloco = DiLoCo(bare, self.inner, transport=transport, **arguments)
        except BaseException:
            self.abandon()
            raise
        self._watch = StepWatch(self.inner)
        self.at_end.callback(self._watch.close)
        self.training = True

    def step(self) -> None:
        """Run `DiLoCo.step` after the optimizer has stepped or a gradient scaler has skipped the step."""
        self.begun.step(self._watch.trained())

    @property
    def begun(self) -> DiLoCo:
        """The `DiLoCo` after training has started."""
        assert self.diloco is not None, "training has started"
        return self.diloco

    def show(self) -> None:
        """During training, put the parameters that are to be evaluated or saved into the model."""
        if self.training and self.parameters == "global" and self.hidden is None:
            self.begun.check_model()
            self.hidden = self._shown.enter_context(holding(self.begun.local_values(), self.begun.global_values()))

    def hide(self) -> None:
        """Put the local parameters back into the model."""
        if self.hidden is not None:
            reshard(self.begun.model)
            self._shown.close()
            self.hidden = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the chosen parameters inside a ``with`` block."""
        before = self.hidden
        self.show()
        try:
            yield
        finally:
            if before is None:
                self.hide()

    def end(self, instead: Mapping[str, Tensor] | None = None) -> None:
        """Merge what is in flight, and leave the model with the chosen `parameters`, or with ``instead`` if given."""
        try:
            self.hide()
            self.begun.end()
            if instead is None and self.parameters == "global":
                instead = self.begun.global_values()
            if instead is not None:
                hold(self.begun, instead)
            self.at_end.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Put the local parameters back and remove the hook from the optimizer; do nothing after `end`."""
        self.hide()
        error = sys.exception() or TransportError("training was abandoned")
        with suppress(type(error)):  # the connection ends with the error of the caller
            self.at_end.__exit__(type(error), error, None)
        self.training = False

    def resume(self, folder: Path | None, *, check_model: bool = False) -> None:
        """Restore the state in ``folder``, or the one that the framework has loaded."""
        if folder is not None and saved_states(folder):
            load_state(folder, self.begun, check_model=check_model, inner=self.inner)
            if (step := self._loaded.get("steps", self.begun.steps)) != self.begun.steps:
                words = f"states of step {self.begun.steps}, but the checkpoint beside it is of step {step}: saving"
                raise CheckpointError(f"{folder} holds {words} was interrupted. Resume from another checkpoint.")
        elif "diloco" in self._loaded:
            restore(self.begun, self._loaded)
        else:
            raise CheckpointError(
                f"{folder or 'The checkpoint'} has no DiLoCo state. Resume from one that DiLoCoCallback has saved (if "
                "it is outside the Trainer's output_dir: resume_from_checkpoint=...), or begin with its weights."
            )

    def beside(self, checkpoint: Any) -> Path | None:
        """Return the folder for what the ranks of one job save beside a checkpoint file; None: the framework does."""
        if not of_one_job(self.begun):
            return None
        if "://" in str(checkpoint):
            raise ConfigurationError(f"The replicas of one job save into folders, but the checkpoint is {checkpoint}.")
        return Path(f"{Path(checkpoint).resolve()}.replicas")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a framework saves beside a model, which holds the chosen `parameters`."""
        if self.diloco is None:
            return dict(self._loaded)
        if of_one_job(self.diloco):  # see `beside`
            return {"steps": self.diloco.steps}
        saves_globals = self.training and self.parameters == "global"
        return state_of(self.diloco, (self.hidden or self.diloco.local_values()) if saves_globals else None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what `state_dict` returned for `resume`."""
        self._loaded = state


def hold(diloco: DiLoCo, values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the synchronised parameters and buffers, which keep their dtype and device."""
    for name, shard in diloco.local_values().items():
        shard.copy_(values[name])


def state_of(diloco: DiLoCo, local: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Return the state that is saved beside a model.

    ``local`` are the local parameters and buffers by name if the model that is saved holds the global ones, else None.
    """
    return {"diloco": diloco.state_dict(), "local": local, "replica": diloco.transport.replica}


def restore(diloco: DiLoCo, state: Mapping[str, Any]) -> None:
    """Restore the state that `state_of` returned; afterwards the model holds its local parameters.

    Raises:
        CheckpointError: if it belongs to another replica, model or schedule. Nothing was changed.
    """
    with readable_state("The state"):
        saved, local = state["diloco"], state["local"]
        theirs: dict[str, Any] = {"replica": state["replica"]}
        mine: dict[str, Any] = {"replica": diloco.transport.replica}
        if local is not None:
            theirs |= {name: tuple(value.shape) for name, value in local.items()}
            mine |= {name: tuple(value.shape) for name, value in diloco.local_values().items()}
        if difference := diff(theirs, mine, "the checkpoint", "this run"):
            raise CheckpointError(f"{difference}. Resume each replica from its own checkpoint. Nothing was loaded.")
    diloco.load_state_dict(saved)
    if local is not None:
        hold(diloco, local)


def save_state(
    checkpoint: Path, diloco: DiLoCo, local: Mapping[str, Tensor] | None = None, inner: Optimizer | None = None
) -> None:
    """Save the state that this rank needs to resume exactly, on all ranks of the replica.

    Args:
        checkpoint: the framework's checkpoint folder.
        local: name -> local value of parameters and buffers, if the framework saves the global ones as the model; else
            None.
        inner: the inner optimizer, whose state the framework saves of one rank, if each rank is a replica.

    Raises:
        ConfigurationError: if another replica has saved into the same folder.
        CheckpointError: if the state can't be written.
    """
    together = of_one_job(diloco)
    if not (together or _is_sharded(diloco.model)) and dist.is_initialized() and dist.get_rank() != 0:
        return
    replica, mine = diloco.transport.replica, _place(checkpoint, diloco)
    others = [name for name in saved_states(checkpoint) if name.partition("-rank-")[0] != f"replica-{replica}"]
    if others and not together:
        raise ConfigurationError(
            f"Replica {replica} can't save into {checkpoint}, because {others[0]} saves there and each would overwrite "
            "the other's model and optimizer. Give each replica its own folder."
        )
    about = {"replica": replica, "steps": diloco.steps, "model": _model_digest(diloco)}
    state = state_of(diloco, local)
    if together and inner is not None:
        state |= {"local": local or diloco.local_values(), "inner": inner.state_dict()}
    save_checkpoint(mine, diloco.steps, {"state": state}, about=about, keep=1)


def load_state(checkpoint: Path, diloco: DiLoCo, *, check_model: bool, inner: Optimizer | None = None) -> None:
    """Restore the state that `save_state` saved, on all ranks of the replica, before the first step.

    Afterwards the model holds its local parameters, even if the framework saved the global ones.

    Args:
        check_model: whether to check that the model is the one saved with the state; True if it is already loaded.
        inner: see `save_state`.

    Raises:
        CheckpointError: if the state of this replica is missing or damaged, or belongs to another model or schedule.
    """
    mine = _place(checkpoint, diloco)
    if not mine.exists() and (others := saved_states(checkpoint)):
        raise CheckpointError(
            f"{checkpoint} holds {', '.join(others)}, but not {mine.name}. Resume from the folder that this replica "
            "saved, with the same number of ranks."
        )
    opened = open_checkpoint(mine)
    if check_model and not of_one_job(diloco) and opened.about.get("model") != _model_digest(diloco):
        raise CheckpointError(
            f"The model that was loaded is not the one saved in {checkpoint}. Pass the folder that it was loaded from "
            "to DiLoCoCallback (resume_from_checkpoint=...)."
        )
    state = opened.load("state")
    restore(diloco, state)
    if inner is not None and "inner" in state:
        load_optimizer_state(inner, state["inner"])


def _model_digest(diloco: DiLoCo) -> str:
    """Return the digest of the parameters that the model holds; a framework may leave buffers out of its file."""
    held = diloco.local_values()
    return digest_tensors({name: held[name] for name in diloco.named_parameters()})


def _place(checkpoint: Path, diloco: DiLoCo) -> Path:
    """Return the folder of this rank's state."""
    suffix = f"-rank-{dist.get_rank()}-of-{dist.get_world_size()}" if _is_sharded(diloco.model) else ""
    return checkpoint / "diloco" / f"replica-{diloco.transport.replica}{suffix}"


def saved_states(checkpoint: Path) -> list[str]:
    """Return the names of all states saved in the folder."""
    return sorted(path.name for path in (checkpoint / "diloco").glob("replica-*"))


def replica_share(dataset: Any, *, replica: int, num_replicas: int, seed: int | None = 0) -> Any:
    """Return one replica's share of a map-style data set. Shares are disjoint and have equal sizes.

    So an epoch has the same number of steps on every replica. The remainder, fewer than M samples, is left out.

    Args:
        dataset: a data set with ``__len__`` and ``__getitem__``. The share of a `datasets.Dataset` or of a tensor has
            the same type; any other share is a `torch.utils.data.Subset`.
        replica: the number m of the replica, from 0 to M - 1.
        num_replicas: the number M of replicas.
        seed: the seed of the shuffle before the split, the same on all replicas. None: replica m gets every M-th
            sample, starting at sample m.

    Raises:
        ConfigurationError: if ``replica`` is out of range, or if the data set has no length or fewer than M samples.

    >>> [list(replica_share(range(7), replica=m, num_replicas=3, seed=None)) for m in range(3)]
    [[0, 3], [1, 4], [2, 5]]
    >>> replica_share(torch.arange(7) * 10, replica=1, num_replicas=3, seed=None)
    tensor([10, 40])
    """
    check_replica(replica, num_replicas)
    if not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"The data set must have a length, and a {type(dataset).__name__} has none. For a Hugging Face stream, use "
            f"datasets.distributed.split_dataset_by_node(dataset, rank={replica}, world_size={num_replicas}), after "
            "everything else that is done to it."
        )
    each = len(dataset) // num_replicas
    if each == 0:
        raise ConfigurationError(
            f"The data set must have at least one sample per replica, got {len(dataset)} for {num_replicas} replicas."
        )
    order = torch.arange(len(dataset), dtype=torch.int64, device="cpu")
    if seed is not None:
        generator = torch.Generator("cpu").manual_seed(seed)
        order = torch.randperm(len(dataset), generator=generator, dtype=torch.int64, device="cpu")
    indices = order[replica : each * num_replicas : num_replicas].tolist()
    if isinstance(dataset, Tensor):
        return dataset[indices]
    return dataset.select(indices) if hasattr(dataset, "select") else Subset(dataset, indices)
