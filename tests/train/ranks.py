"""Replicas of several ranks, each in its own process, and the same training on one rank for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.algorithm import SyncSchedule, ValueSchedule, make_codec, partition
from diloco.checkpoint import Checkpoint, save_checkpoint
from diloco.model import DecoderSettings, build_model
from diloco.outer import DiLoCo
from diloco.train import InnerLoop, OptimizerSettings, ReplicaState, Strategy, make_inner_optimizer, parallelise
from diloco.transport import ReplicaGroup, open_replica_group

CPU = torch.device("cpu")
MODEL = DecoderSettings(layers=2, width=16, ffn_width=33, heads=2, vocab_size=17, max_sequence_length=16)
"""33 and 17 rows can't be divided evenly among any number of ranks."""

SCHEDULE = SyncSchedule(inner_steps=6, num_fragments=3, overlap_steps=2)
STEPS = 19
"""After these steps each of the three fragments has been merged twice, and the first has its third in flight."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The training setup of a replica, which is the same on all of its ranks."""

    strategy: Strategy = "none"
    size: int = 1
    codec: str = "float32"
    error_feedback: bool = False
    precision: Any = "float32"
    optimizer: str = "AdamW"
    at_home: tuple[str, ...] = ()


def open_group(setup: Setup, position: int, folder: Path, replica: int = 0) -> ReplicaGroup:
    """Connect to the other ranks, if there are any, through a file."""
    if setup.strategy == "none":
        return ReplicaGroup()
    store = dist.FileStore(str(folder / f"store-{replica}"), setup.size)
    return open_replica_group(store, replica=replica, position=position, size=setup.size, device=CPU, timeout_s=300.0)


class Rank:
    """One rank that is ready to train. Batches depend on the step; ranks have uneven shares of them, in pieces."""

    def __init__(self, setup: Setup, group: ReplicaGroup) -> None:
        self.setup = setup
        self.group = group
        model = build_model(MODEL, seed=0)
        self.parallel = parallelise(model, setup.strategy, group, CPU, setup.precision)
        self.model = self.parallel.model
        self.inner = InnerLoop(
            self.parallel,
            make_inner_optimizer(OptimizerSettings(name=setup.optimizer), self.model, group),
            learning_rate=ValueSchedule(peak=3e-3),
            clip_norm=0.25,
            precision=setup.precision,
            accumulation=2,
        )
        self.diloco = DiLoCo(
            self.model,
            self.inner.optimizer,
            schedule=SCHEDULE,
            fragments=partition(self.model, num_fragments=3, at_home=setup.at_home),
            at_home=setup.at_home,
            codec=make_codec(setup.codec),
            error_feedback=setup.error_feedback,
        )
        self.state = ReplicaState(self.inner, self.diloco)

    def step(self) -> tuple[float, Any]:
        """Run one inner step and the synchronisation after it; return the loss and the step's result."""
        step = self.diloco.steps
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 17, (5, 13), generator=generator)
        loss = self.inner.accumulate_gradients(batch[:, :-1], batch[:, 1:])
        self.inner.unscale()
        done = self.inner.apply(step)
        self.diloco.step()
        return float(loss), done

    def train(self, steps: int) -> tuple[list[float], list[float]]:
        """Run some steps and return their losses and gradient norms."""
        done = [self.step() for _ in range(steps)]
        return [loss for loss, _ in done], [inner.gradient_norm for _, inner in done]

    def values(self) -> dict[str, Tensor]:
        """Return all values with the shape of a parameter as whole tensors: weights, inner, global and outer state."""
        values = self.state.values() | {f"global/{name}": v for name, v in self.state.global_params().items()}
        values |= {f"outer/{name}": value for name, value in self.state.outer_state().items()}
        for parameter, slots in self.inner.optimizer.state.items():
            shaped = {slot: value for slot, value in slots.items() if isinstance(value, Tensor) and value.dim() > 0}
            values |= {f"inner/{slot}/{self.state.names[id(parameter)]}": value for slot, value in shaped.items()}
        return {name: whole(value).clone() for name, value in values.items()}


def whole(value: Tensor) -> Tensor:
    """Return the whole of a tensor of which this rank may have a shard."""
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference over all values; both must have the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> Sequence[str]:
    """Return the names of the values whose bits differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def save(rank: Rank, folder: Path, keep: int = 5) -> Path:
    """Save the share of this rank, as a session does."""
    return save_checkpoint(
        folder,
        rank.diloco.steps,
        {
            "replica-0-values": rank.state.values(),
            "global": rank.state.global_params(),
            "outer": rank.state.outer_state(),
        },
        own={"replica-0-own": rank.state.rest()} if rank.group.position < rank.parallel.num_shards else {},
        about={"ranks": rank.group.size},
        keep=keep,
        group=rank.group,
    )


def load(rank: Rank, checkpoint: Checkpoint) -> None:
    own = checkpoint.load(f"replica-0-own-{rank.group.position % rank.parallel.num_shards}")
    rank.state.load(checkpoint, "replica-0-values", own)
