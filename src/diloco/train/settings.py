"""The settings of a training run. This module works without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.algorithm import SyncSettings
from diloco.data import DataSettings
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings
from diloco.private_files import check_url
from diloco.transport import EmulateSettings, NetworkSettings

__all__ = ["Algorithm", "CheckpointSettings", "EvaluationSettings", "OptimizerSettings", "RunSettings", "TrainSettings"]

Algorithm = Literal["streaming", "diloco", "data-parallel"]

_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (
            *(f"train.{name}" for name in ("steps", "batch_size", "gradient_accumulation", "sequence_length")),
            *("train.stop_after", "checkpoint.keep", "sync.num_fragments"),
        ),
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        ("evaluation.every_steps", "evaluation.sequences", "checkpoint.every_steps"),
    ),
    (
        "a positive number",
        lambda value: 0 < value < math.inf,
        ("optimizer.learning_rate", "optimizer.clip_norm", "sync.outer_learning_rate"),
    ),
    (
        "a number from 0 to 1",
        lambda value: 0 <= value <= 1,
        ("optimizer.final_ratio", "sync.merge_alpha", "sync.error_feedback"),
    ),
    ("at least 0 and less than 1", lambda value: 0 <= value < 1, ("sync.outer_momentum",)),
    ("a number from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63, ("seed",)),
)
"""The range of each setting that has one, independent of all other settings. None is always allowed."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The length, batch size, precision and device of a run."""

    steps: Annotated[int, arg(aliases=["--steps"])] = 1000
    """Inner steps of the whole run. Learning-rate schedules span them."""
    stop_after: Annotated[int | None, arg(aliases=["--stop-after"])] = None
    """Save and stop after this step."""
    batch_size: Annotated[int, arg(aliases=["--batch-size"])] = 4
    """Sequences per replica and inner step."""
    gradient_accumulation: int = 1
    """Micro-batches that a replica's batch is split into to save memory; they are computed one after the other."""
    sequence_length: Annotated[int, arg(aliases=["--sequence-length"])] = 128
    """Tokens per sequence."""
    precision: Annotated[Literal["float32", "bfloat16", "float16"], arg(aliases=["--precision"])] = "float32"
    """Autocast type of the forward pass. Parameters stay float32."""
    device: Annotated[str, arg(aliases=["--device"])] = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    global_device: Literal["model", "cpu"] = "model"
    """Where global parameters and outer state are kept. model: on the model's device; cpu: in (pinned) host memory."""
    parallelism: Literal["fsdp", "ddp"] = "fsdp"
    """How the ranks of one replica hold its state. fsdp: each holds a shard; ddp: each holds a full copy."""
    compile: Annotated[bool, arg(aliases=["--compile"])] = False
    """Compile the model's blocks and parts of the loss with torch.compile."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations of a block in the backward pass instead of keeping them. full: all of them; selective: all
    except the outputs of matrix products and attention. The results are the same bits."""
    data_parallel_steps: Annotated[int, arg(aliases=["--data-parallel-steps"])] = 0
    """Start with this many shared data-parallel steps."""
    init_from: Annotated[Path | None, arg(aliases=["--init-from"])] = None
    """Start from the parameters of a run or checkpoint, a .safetensors file, or a folder of transformers."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The inner optimizer and its learning rate."""

    name: str = "AdamW"
    """A class of torch.optim, or your own as module:Class. With Muon, the hidden matrices use Muon; embeddings, the
    head and vectors use AdamW, whose rate times `matrix_lr_ratio` (10) is that of Muon."""
    learning_rate: Annotated[float, arg(aliases=["--learning-rate"])] = 4e-4
    """Peak learning rate (of AdamW, if the optimizer is Muon)."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.95), "weight_decay": 0.1})
    """Further arguments for the optimizer's class, as a table."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: cosine, wsd (warm-up-stable-decay), or constant."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises linearly to its peak."""
    final_ratio: float = 0.05
    """Learning rate at the end, as a fraction of the peak (cosine, wsd)."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. None: no clipping."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Held-out evaluation of the global parameters."""

    every_steps: int | None = None
    """Steps between evaluations. Default: a tenth of the run. 0: only at the end."""
    sequences: int = 256
    """Held-out sequences per evaluation, the same ones every time. 0: all."""
    sample_prompts: tuple[str, ...] = ("def ",)
    """Prompts for samples; each gets one sample. An empty prompt starts a new document."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Saving and resuming."""

    every_steps: int | None = None
    """Steps between checkpoints. Default: a quarter of the run. 0: only at the end."""
    keep: int = 2
    """How many of the newest checkpoints to keep. Replicas in processes of their own keep older ones until a newer one
    is complete on all of them."""
    mirror: str | None = None
    """Upload checkpoints to s3://..., gs://..., hf://... or a path as well. Each peer of a swarm needs another one."""
    resume: Annotated[str | None, arg(aliases=["--resume"], metavar="RUN")] = None
    """Resume from this run folder, checkpoint or mirror."""

    def __post_init__(self) -> None:
        for place in filter(None, map(str, (self.mirror or "", self.resume or ""))):
            check_url(place)
            if re.match(r"\w{2,}:(?!//)", place):  # else it would become a folder of this name
                raise ConfigurationError(f"{place!r} is neither a path nor a URL such as s3://BUCKET/FOLDER.")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings that decide what a run computes.

    Raises:
        ConfigurationError: if a value is outside its own range. Combinations of values are checked by
            `diloco.train.resolve`.
    """

    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Run folder. Default: runs/NAME, numbered if it exists."""
    seed: int = 0
    """Seed of weights, data order and random generators."""
    algorithm: Algorithm = "streaming"
    """streaming: Streaming DiLoCo; diloco: DiLoCo (Algorithm 1 of its paper); data-parallel: average gradients at every
    step."""
    train: TrainSettings = field(default_factory=TrainSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    emulate: EmulateSettings = field(default_factory=EmulateSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def __post_init__(self) -> None:
        for requirement, fits, names in _RANGES:
            for name in names:
                value = attrgetter(name)(self)
                if value is not None and not fits(value):
                    raise ConfigurationError(f"{name} must be {requirement}, got {value}.")
        self.emulate.check(self.network)
