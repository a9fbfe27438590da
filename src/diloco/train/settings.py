"""The settings of a training run. This module works without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.algorithm import CodecSettings, FragmentSettings, MergeSettings, OuterSettings, ScheduleSettings
from diloco.data import DataSettings
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings
from diloco.transport import SwarmSettings, TransportSettings

__all__ = ["Algorithm", "CheckpointSettings", "EvaluationSettings", "InnerSettings", "RunSettings", "TrainSettings"]

Algorithm = Literal["streaming", "diloco", "data-parallel", "none"]

_TRAIN = ("steps", "batch_size", "gradient_accumulation", "sequence_length", "stop_after", "threads")
_EVALUATION = ("every_steps", "sequences", "sample_tokens", "sample_every_steps")
_OUTER = ("learning_rate", "gain", "epsilon", "max_norm")
_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (*(f"train.{name}" for name in _TRAIN), "checkpoint.keep", "fragments.num_fragments"),
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        (
            *(f"evaluation.{name}" for name in _EVALUATION),
            *("checkpoint.every_steps", "train.loss_chunk_tokens", "outer.momentum_warmup_outer_steps"),
        ),
    ),
    (
        "a positive number",
        lambda value: 0 < value < math.inf,
        ("train.peak_flops_per_s", "inner.learning_rate", "inner.clip_norm", *(f"outer.{name}" for name in _OUTER)),
    ),
    (
        "a number from 0 to 1",
        lambda value: 0 <= value <= 1,
        ("inner.final_ratio", "outer.learning_rate_final_ratio", "merge.alpha", "codec.error_feedback_decay"),
    ),
    ("at least 0 and less than 1", lambda value: 0 <= value < 1, ("outer.momentum",)),
    ("two numbers from 0 to less than 1", lambda value: all(0 <= beta < 1 for beta in value), ("outer.betas",)),
    ("an even number from 2 to 65536", lambda value: 2 <= value <= 65536 and value % 2 == 0, ("codec.block_size",)),
    ("a number from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63, ("seed",)),
)
"""The range of each setting that has one, independent of all other settings. None is always allowed."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The length, batch size, precision and device of a run."""

    steps: Annotated[int, arg(aliases=["--steps"])] = 1000
    """Inner steps of the whole run. Learning-rate schedules span them."""
    stop_after: Annotated[int | None, arg(aliases=["--stop-after"])] = None
    """Save and stop after this step. The schedules still span `steps`."""
    batch_size: int = 4
    """Sequences per replica and inner step."""
    gradient_accumulation: int = 1
    """Micro-batches that a replica's batch is split into to save memory; they are computed one after the other."""
    sequence_length: int = 128
    """Tokens per sequence."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast type of the forward pass. float16 uses a gradient scaler. Parameters stay float32."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps (Apple), or auto (cuda if available, else mps, else cpu)."""
    global_device: Literal["model", "cpu"] = "model"
    """Where global parameters and outer state are kept. model: on the model's device; cpu: in (pinned) host memory."""
    parallelism: Literal["fsdp", "ddp"] = "fsdp"
    """How the ranks of one replica hold its state. fsdp: each holds a shard; ddp: each holds a full copy."""
    threads: int | None = None
    """CPU threads of torch. Default: one per core, divided among the processes of the run on this machine."""
    compile: bool = False
    """Compile the model's blocks, and the parts of the loss between its matrix products, with torch.compile."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations of a block in the backward pass instead of keeping them. full: all of them; selective: all
    except the outputs of matrix products and attention. The results are the same bits."""
    loss_chunk_tokens: int = 8192
    """Tokens per chunk of the loss. A larger batch is computed chunk by chunk, so that only one chunk's logits are in
    memory. 0: compute the whole batch at once."""
    document_masks: bool = False
    """Mask attention between different documents of a sequence, in training and in evaluation."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Value for torch.set_float32_matmul_precision, which affects products in float32. high allows TF32 on a GPU."""
    peak_flops_per_s: float | None = None
    """Peak operations per second of the device in train.precision, used to report model flops utilisation (MFU).
    Default: the data-sheet value of a known GPU; for any other device no MFU is reported."""
    data_parallel_steps: Annotated[int, arg(aliases=["--data-parallel-steps"])] = 0
    """Start with this many shared data-parallel steps (the DiLoCo paper's pretraining phase)."""
    init_from: Annotated[Path | None, arg(aliases=["--init-from"])] = None
    """Start from the global parameters of this checkpoint, run folder or .safetensors file, or from a transformers
    model folder (Llama, Qwen3, Arcee, Apertus). Such a folder also sets model.* and data.tokenizer if nothing else
    does."""


@dataclass(frozen=True, kw_only=True)
class InnerSettings:
    """The inner optimizer and its learning rate."""

    name: str = "AdamW"
    """A class of torch.optim, or your own as module:Class. With Muon, the hidden matrices use Muon; embeddings, the
    head and vectors use AdamW."""
    learning_rate: float = 4e-4
    """Peak learning rate. Muon: the rate of AdamW; hidden matrices use `arguments.matrix_lr_ratio` (10) times it."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.95), "weight_decay": 0.1})
    """Further arguments for the optimizer's class, as a table."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: cosine, wsd (warm-up-stable-decay), or constant."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises linearly to its peak."""
    decay_steps: int | None = None
    """Steps of the final linear decay (wsd only). Default: a fifth of the run."""
    final_ratio: float = 0.05
    """Learning rate at the end, as a fraction of the peak (cosine, wsd)."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. None: no clipping."""

    def decay_over(self, steps: int) -> int:
        """Return the steps of wsd's final decay in a run of ``steps``; the default leaves room for the warm-up."""
        usual = min(max(1, steps // 5), steps - self.warmup_steps)
        return usual if self.decay_steps is None else self.decay_steps


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Held-out evaluation of the global parameters."""

    every_steps: int | None = None
    """Steps between evaluations. Default: a tenth of the run. 0: only at the end."""
    sequences: int = 256
    """Held-out sequences per evaluation, the same ones every time. 0: all."""
    sample_prompts: tuple[str, ...] = ("def ",)
    """Prompts for samples; each gets one sample. An empty prompt starts a new document."""
    sample_tokens: int = 200
    """Largest length of a sample in tokens. 0: no samples."""
    sample_every_steps: int = 0
    """Steps between samples, which use the same seed every time. 0: only at the end."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Saving and resuming."""

    every_steps: int | None = None
    """Steps between checkpoints. Default: a quarter of the run. 0: only at the end."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    resume: Annotated[Path | None, arg(aliases=["--resume"])] = None
    """Resume from this run folder or checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings that decide what a run computes.

    Raises:
        ConfigurationError: if a value is outside its own range. Combinations of values are checked by
            `diloco.train.resolve`.
    """

    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Run folder. Default: runs/RUN in a swarm (swarm.run), otherwise runs/ALGORITHM-PRESET, with a number appended if
    that folder exists."""
    seed: int = 0
    """Seed of the initial weights, the data order and every replica's random generators."""
    algorithm: Algorithm = "streaming"
    """streaming: Streaming DiLoCo; diloco: DiLoCo (Algorithm 1 of its paper); data-parallel: average gradients at every
    step; none: independent replicas."""
    train: TrainSettings = field(default_factory=TrainSettings)
    inner: InnerSettings = field(default_factory=InnerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    fragments: FragmentSettings = field(default_factory=FragmentSettings)
    merge: MergeSettings = field(default_factory=MergeSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    codec: CodecSettings = field(default_factory=CodecSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    swarm: SwarmSettings = field(default_factory=SwarmSettings)
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
