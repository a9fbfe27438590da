"""What can be set about the training loop. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from diloco.algorithm.settings import CodecSettings, FragmentSettings, MergeSettings, OuterSettings, ScheduleSettings
from diloco.data.settings import DataSettings
from diloco.errors import ConfigurationError
from diloco.model.settings import ModelSettings
from diloco.transport.hivemind.settings import SwarmSettings
from diloco.transport.settings import TransportSettings

__all__ = ["Algorithm", "CheckpointSettings", "EvaluationSettings", "InnerSettings", "RunSettings", "TrainSettings"]

Algorithm = Literal["streaming", "diloco", "data-parallel", "none"]

_TRAIN = ("steps", "batch_size", "gradient_accumulation", "sequence_length", "stop_after", "threads")
_EVALUATION = ("every_steps", "sequences", "sample_tokens", "sample_every_steps")
_OUTER = ("learning_rate", "gain", "epsilon", "max_norm", "median_norm_factor")
_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (*(f"train.{name}" for name in _TRAIN), "checkpoint.keep", "fragments.num_fragments"),
    ),
    (
        "0 or more",
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
    ("0 or more and less than 1", lambda value: 0 <= value < 1, ("outer.momentum",)),
    ("two numbers from 0 to less than 1", lambda value: all(0 <= beta < 1 for beta in value), ("outer.betas",)),
    ("an even number from 2 to 65536", lambda value: 2 <= value <= 65536 and value % 2 == 0, ("codec.block_size",)),
    ("a number from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63, ("seed",)),
)
"""What the value of each of these settings must be where there is one, whatever the others are."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Length, batch, precision and place of a run."""

    steps: Annotated[int, arg(aliases=["--steps"])] = 1000
    """Inner steps of the whole run; learning-rate schedules are laid out over them."""
    stop_after: Annotated[int | None, arg(aliases=["--stop-after"])] = None
    """Save and stop after this step, with the schedules laid out for `steps`."""
    batch_size: int = 4
    """Sequences per replica and inner step."""
    gradient_accumulation: int = 1
    """Pieces a replica's batch is split into, one after the other, to save memory."""
    sequence_length: int = 128
    """Tokens per sequence."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast type of the forward pass; float16 uses a gradient scaler. Parameters stay float32."""
    device: str = "auto"
    """cpu, cuda, cuda:N, mps (Apple), or auto (cuda or mps where there is one)."""
    global_device: Literal["model", "cpu"] = "model"
    """Where global parameters and outer state live: beside the model, or in (pinned) host memory."""
    parallelism: Literal["fsdp", "ddp"] = "fsdp"
    """Inside a replica of several ranks: fsdp: each holds a shard of everything; ddp: each holds everything."""
    threads: int | None = None
    """CPU threads of torch. Default: one for each core, divided among the processes of the run on this machine."""
    compile: bool = False
    """Compile the model's blocks, and the loss between its matrix products, with torch.compile."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Compute a block's activations again in the backward pass instead of keeping them: all (full), or all but those
    of matrix products and attention (selective). The bits stay the same."""
    loss_chunk_tokens: int = 8192
    """The loss of a batch of more tokens is computed in chunks of so many, whose logits alone are held; 0: of all at
    once."""
    document_masks: bool = False
    """Let no token see those of other documents in its sequence, neither in training nor in evaluation."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch.set_float32_matmul_precision, for products that are left in float32: high allows TF32 on a GPU."""
    peak_flops_per_s: float | None = None
    """Of the device in train.precision, what its utilisation (MFU) is a fraction of. Default: that of a device which is
    known, else none is told."""
    data_parallel_steps: Annotated[int, arg(aliases=["--data-parallel-steps"])] = 0
    """Begin with this many shared data-parallel steps (the DiLoCo paper's pretraining phase)."""
    init_from: Annotated[Path | None, arg(aliases=["--init-from"])] = None
    """Begin from the global parameters of this checkpoint, run folder or .safetensors file, or from a folder of
    transformers (Llama, Qwen3, Arcee, Apertus), which then says model.* and data.tokenizer where nothing else does."""


@dataclass(frozen=True, kw_only=True)
class InnerSettings:
    """The inner optimizer and its learning rate."""

    name: str = "AdamW"
    """Name of a class in torch.optim. Muon: hidden matrices by Muon, embeddings, head and vectors by AdamW. Or
    module:class, your own."""
    learning_rate: float = 4e-4
    """Peak learning rate. Muon: that of AdamW; hidden matrices have `arguments.matrix_lr_ratio` (10) times it."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.95), "weight_decay": 0.1})
    """Further arguments of the optimizer's class, as a table."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: cosine, warm-up-stable-decay, or constant."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises linearly to its peak."""
    decay_steps: int | None = None
    """wsd: steps of the final linear decay. Default: a fifth of the run."""
    final_ratio: float = 0.05
    """Learning rate at the end, as a fraction of the peak (cosine, wsd)."""
    clip_norm: float | None = 1.0
    """Clip the global gradient norm to this; None: no clipping."""

    def decay_over(self, steps: int) -> int:
        """Steps of the final decay of wsd in a run of ``steps``; at most those that the warm-up leaves."""
        usual = min(max(1, steps // 5), steps - self.warmup_steps)
        return usual if self.decay_steps is None else self.decay_steps


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Held-out evaluation of the global parameters."""

    every_steps: int | None = None
    """Steps between two evaluations during the run. Default: a tenth of the run. 0: only at the end."""
    sequences: int = 256
    """Held-out sequences per evaluation, always the same ones; 0: all."""
    sample_prompts: tuple[str, ...] = ("def ",)
    """What samples begin with, one of each; an empty text: the beginning of a document."""
    sample_tokens: int = 200
    """Length of a sample; 0: none."""
    sample_every_steps: int = 0
    """Steps between samples during the run, drawn alike each time. 0: only at the end."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Saving and resuming."""

    every_steps: int | None = None
    """Steps between two checkpoints. Default: a quarter of the run. 0: only at the end."""
    keep: int = 2
    """How many checkpoints to keep, newest first."""
    resume: Annotated[Path | None, arg(aliases=["--resume"])] = None
    """Go on from this run folder or checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that decides what a run computes; each value is in its range, whatever the others are.

    Raises:
        ConfigurationError: for one that is not.
    """

    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Run folder. Default: runs/ALGORITHM-PRESET, with a number added when that exists."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and every replica's generators."""
    algorithm: Algorithm = "streaming"
    """streaming: Streaming DiLoCo; diloco: Algorithm 1; data-parallel: average gradients at every step;
    none: independent replicas."""
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
        for words, fits, names in _RANGES:
            for name in names:
                value = attrgetter(name)(self)
                if value is not None and not fits(value):
                    raise ConfigurationError(f"{name}={value} was given; it must be {words}.")
