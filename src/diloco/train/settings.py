"""The settings of a training run, and what follows from those that were left out. This module works without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta
from tyro.conf import arg

from diloco.algorithm import AVERAGES, CODECS, MERGE_RULES, OUTER_OPTIMIZERS, SyncSchedule, SyncSettings, check_ranges
from diloco.data import DataSettings
from diloco.devices import Precision, check_device
from diloco.errors import ConfigurationError
from diloco.model import ModelSettings
from diloco.plugins import is_own
from diloco.private_files import check_url
from diloco.traits import Trait
from diloco.transport import EmulateSettings, NetworkSettings, transports

Algorithm = Literal["streaming", "diloco", "data-parallel"]

_Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The length, batch size, precision and device of a run."""

    # a run that resumes with more of them stretches its learning rates, which a note says
    steps: Annotated[_Count, arg(aliases=["--steps"]), Trait.CHANGEABLE] = 1000
    """Inner steps of the whole run. Learning-rate schedules span them."""
    stop_after: Annotated[
        int | None,
        Meta(ge=1),
        arg(aliases=["--stop-after"]),
        Trait.OF_CALL,
        Trait.OF_MACHINE,
        Trait.CHANGEABLE,
    ] = None
    """Save and stop after this step."""
    batch_size: Annotated[_Count, arg(aliases=["--batch-size"])] = 4
    """Sequences per replica and inner step."""
    gradient_accumulation: _Count = 1
    """Micro-batches that a replica's batch is split into to save memory; they are computed one after the other."""
    sequence_length: Annotated[_Count, arg(aliases=["--sequence-length"])] = 128
    """Tokens per sequence."""
    precision: Annotated[Precision, arg(aliases=["--precision"])] = "float32"
    """Autocast type of the forward pass. Parameters stay float32."""
    device: Annotated[str, arg(aliases=["--device"]), Trait.NO_PLACE, Trait.OF_MACHINE] = "auto"
    """cpu, cuda, cuda:N, mps, or auto."""
    global_device: Annotated[Literal["model", "cpu"], Trait.OF_MACHINE, Trait.CHANGEABLE] = "model"
    """Where global parameters and outer state are kept. model: on the model's device; cpu: in (pinned) host memory."""
    parallelism: Literal["fsdp", "ddp"] = "fsdp"
    """How the ranks of one replica hold its state. fsdp: each holds a shard; ddp: each holds a full copy."""
    compile: Annotated[bool, arg(aliases=["--compile"])] = False
    """Compile the model's blocks and parts of the loss with torch.compile."""
    activation_checkpointing: Annotated[Literal["none", "full", "selective"], Trait.CHANGEABLE] = "none"
    """Recompute activations of a block in the backward pass instead of keeping them. full: all of them; selective: all
    except the outputs of matrix products and attention. The results are the same bits."""
    data_parallel_steps: Annotated[int, Meta(ge=0), arg(aliases=["--data-parallel-steps"])] = 0
    """Start with this many shared data-parallel steps. Over tcp and swarm no preset has any."""
    # no run that resumes reads it
    init_from: Annotated[Path | None, arg(aliases=["--init-from"]), Trait.NO_PLACE] = None
    """Start from the parameters of a run or checkpoint, a .safetensors file, or a folder of transformers."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The inner optimizer and its learning rate."""

    name: Annotated[str, Trait.NO_PLACE] = "AdamW"
    """A class of torch.optim, or your own as module:Class. With Muon, the hidden matrices use Muon; embeddings, the
    head and vectors use AdamW, whose rate times `matrix_lr_ratio` (10) is that of Muon."""
    learning_rate: Annotated[float, Meta(gt=0), arg(aliases=["--learning-rate"])] = 4e-4
    """Peak learning rate (of AdamW, if the optimizer is Muon)."""
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.95), "weight_decay": 0.1})
    """Further arguments for the optimizer's class, as a table."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: cosine, wsd (warm-up-stable-decay), or constant."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 100
    """Steps over which the learning rate rises linearly to its peak."""
    final_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Learning rate at the end, as a fraction of the peak (cosine, wsd)."""
    clip_norm: Annotated[float | None, Meta(gt=0)] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. None: no clipping."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Held-out evaluation of the global parameters."""

    every_steps: Annotated[int | None, Meta(ge=0)] = None
    """Steps between evaluations. Default: a tenth of the run. 0: only at the end."""
    sequences: Annotated[int, Meta(ge=0)] = 256
    """Held-out sequences per evaluation, the same ones every time. 0: all."""
    sample_prompts: Annotated[tuple[str, ...], Trait.NO_PLACE, Trait.MAY_BE_EMPTY] = ("def ",)
    """Prompts for samples; each gets one sample. An empty prompt starts a new document."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Saving and resuming."""

    every_steps: Annotated[int | None, Meta(ge=0)] = None
    """Steps between checkpoints. Default: a quarter of the run. 0: only at the end."""
    keep: _Count = 2
    """How many of the newest checkpoints to keep. Replicas in processes of their own keep older ones until a newer one
    is complete on all of them."""
    mirror: str | None = None
    """Upload checkpoints to s3://..., gs://..., hf://... or a path as well. Each peer of a swarm needs another one."""
    resume: Annotated[str | None, arg(aliases=["--resume"], metavar="RUN"), Trait.OF_CALL] = None
    """Resume from this run folder, checkpoint or mirror."""

    def __post_init__(self) -> None:
        for url in filter(None, map(str, (self.mirror or "", self.resume or ""))):
            check_url(url)
            if re.match(r"\w{2,}:(?!//)", url):  # else it would become a folder of this name
                raise ConfigurationError(f"{url!r} is neither a path nor a URL such as s3://BUCKET/FOLDER.")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings that decide what a run computes.

    Raises:
        ConfigurationError: if a value is outside its own range. Combinations of values are checked by
            `resolve`.
    """

    out: Annotated[Path | None, arg(aliases=["-o"]), Trait.OF_CALL, Trait.OF_MACHINE, Trait.CHANGEABLE] = None
    """Run folder. Default: runs/NAME, numbered if it exists."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of weights, data order and random generators."""
    algorithm: Algorithm = "streaming"
    """streaming: Streaming DiLoCo; diloco: DiLoCo (Algorithm 1 of its paper); data-parallel: average gradients at every
    step."""
    train: TrainSettings = field(default_factory=TrainSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    # a replica keeps its number of processes, only a swarm may change its replicas, and no other run becomes a swarm
    network: Annotated[NetworkSettings, Trait.CHANGEABLE] = field(default_factory=NetworkSettings)
    emulate: Annotated[EmulateSettings, Trait.OF_MACHINE, Trait.CHANGEABLE] = field(default_factory=EmulateSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: Annotated[EvaluationSettings, Trait.CHANGEABLE] = field(default_factory=EvaluationSettings)
    checkpoint: Annotated[CheckpointSettings, Trait.OF_MACHINE, Trait.CHANGEABLE] = field(
        default_factory=CheckpointSettings
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        self.emulate.check(self.network)


LAYERS_PER_FRAGMENT = 3  # Streaming DiLoCo, Fig. 6: three layers per fragment at every scale

_MANY_ROUNDS, _HIGH_GAIN = 50, 2.0
"""With fewer rounds, a gain above this is too high: stock Nesterov lost up to 10 % in runs of 6 rounds (yeto, 27B)."""

S = TypeVar("S", bound=RunSettings)


def resolve(settings: S, *, num_layers: int | None = None, max_sequence_length: int | None = None) -> S:
    """Derive every setting that was left out and check that the settings work together. Resolving is idempotent.

    Args:
        num_layers: the number of transformer layers of the model. If it is None (unknown), the number of fragments has
            no default and is not checked against it.
        max_sequence_length: the longest sequence of the model. None: the value of ``settings.model``, or no limit if
            the model has a source.
    """
    train, sync, evaluation, checkpoint = settings.train, settings.sync, settings.evaluation, settings.checkpoint
    _check_lengths(settings, max_sequence_length)
    _check_together(settings)
    check_device("train.device", train.device)
    rule, alpha = _merge(settings)
    number, overlap = _fragments_and_overlap(settings, num_layers)
    OUTER_OPTIMIZERS.check(sync.outer)
    AVERAGES.check(sync.average)
    mean_codec = None
    if sync.mean_codec != "auto":
        CODECS.check(sync.mean_codec)
        mean_codec = CODECS.component(sync.mean_codec)
    _refuse_if(
        mean_codec is not None and mean_codec.needs_error_feedback,
        f"sync.arguments.average.codec={sync.mean_codec!r} leaves out much of what it encodes, and means have no error "
        "feedback. Use another, such as int8 or fp4.",
    )
    if (rate := sync.outer_learning_rate) is None:
        rate = 0.4 if settings.algorithm == "streaming" else 0.7
    if (evaluate := evaluation.every_steps) is None:
        evaluate = max(1, train.steps // 10)
    if (save := checkpoint.every_steps) is None:
        save = max(1, train.steps // 4)
    if settings.algorithm == "data-parallel":  # it consists of such steps only
        train = replace(train, data_parallel_steps=0)
    return replace(
        settings,
        train=train,
        sync=replace(
            sync,
            codec=_codec(settings),
            merge=rule,
            merge_alpha=alpha,
            num_fragments=number,
            overlap_steps=overlap,
            outer_learning_rate=rate,
        ),
        evaluation=replace(evaluation, every_steps=evaluate),
        checkpoint=replace(checkpoint, every_steps=save),
    )


def make_schedule(settings: RunSettings) -> SyncSchedule:
    """Return the synchronisation schedule of resolved settings."""
    sync = settings.sync
    return SyncSchedule(
        inner_steps=sync.inner_steps, num_fragments=sync.num_fragments or 1, overlap_steps=sync.overlap_steps or 0
    )


_LONG_WINDOWS = (
    "With data of their own, replicas lose by long rounds: in a trial nothing up to --inner-steps 30, 5.5 % at 100 "
    "(benchmarks/own_data). Prefer shorter ones with a coarser codec."
)


def notes(settings: RunSettings) -> tuple[str, ...]:
    """Return warnings, a sentence each, about resolved settings that are allowed but probably a mistake."""
    start, schedule, sync = settings.train.data_parallel_steps, make_schedule(settings), settings.sync
    steps = settings.train.steps - start
    if settings.algorithm not in ("streaming", "diloco") or steps <= 0:
        return ()
    rounds = max(schedule.rounds_of(fragment, steps) for fragment in range(schedule.num_fragments))
    if not rounds:
        return (
            f"No fragment is ever sent, so the global parameters do not change: the {steps} steps"
            f"{' after the shared start' if start else ''} are fewer than sync.inner_steps={schedule.inner_steps}.",
        )
    own = (_LONG_WINDOWS,) if settings.data.local and schedule.inner_steps > 30 else ()
    # after a shared start, or a rise of the momentum, a high gain was best even with 40 rounds (benchmarks/parity)
    rises = sync.arguments_of("outer").get("momentum_warmup", 0) > 0
    if rounds >= _MANY_ROUNDS or start or rises or is_own(sync.outer):
        return own
    chosen = {"learning_rate": sync.outer_learning_rate, "momentum": sync.outer_momentum, "outer_steps": rounds}
    outer = OUTER_OPTIMIZERS.make(sync.outer, sync.arguments_of("outer"), **chosen)
    gain = getattr(outer, "lasting_gain", 0.0)
    if gain <= _HIGH_GAIN:
        return own
    return (
        *own,
        f"The outer optimizer has a gain of {gain:.3g} but too few rounds per fragment ({rounds}) for its momentum "
        f"to build up. Below about {_MANY_ROUNDS} rounds, a gain of 1 to 2 often gives a lower loss. Try "
        "--outer-learning-rate 0.7 --outer-momentum 0.6.",
    )


def _codec(settings: RunSettings) -> str:
    sync, algorithm = settings.sync, settings.algorithm
    name = sync.codec or ("fp4" if algorithm == "streaming" else "float32")
    CODECS.check(name)
    if sync.codec is None and not sync.error_feedback:
        return name  # its class is not needed, which loads torch
    codec = CODECS.component(name)
    if algorithm == "data-parallel" and not (codec and codec.carries_gradients):
        suited = [known for known in CODECS.names if CODECS.component(known).carries_gradients]
        raise ConfigurationError(
            f"sync.codec={name!r} can't carry the gradients of algorithm='data-parallel'. Use --codec "
            f"{' or '.join(suited)}, or --algorithm streaming or diloco, which send pseudo-gradients."
        )
    _refuse_if(
        sync.error_feedback > 0 and (algorithm == "data-parallel" or (codec is not None and codec.exact)),
        f"sync.error_feedback={sync.error_feedback:g} can't be used with sync.codec={name!r} and algorithm="
        f"{algorithm!r}, where there is no loss to feed back. Use a lossy codec such as --codec int8 with --algorithm "
        "streaming or diloco.",
    )
    if codec is not None and codec.needs_error_feedback and not sync.error_feedback:
        raise ConfigurationError(
            f"sync.codec={name!r} leaves out {codec.left_out}, which are lost without error feedback. Add "
            f"--error-feedback {codec.usual_error_feedback:g}, for example."
        )
    return name


def _merge(settings: RunSettings) -> tuple[str, float | None]:
    """Return the merge rule, and alpha if the rule has one."""
    sync, algorithm = settings.sync, settings.algorithm
    alpha = sync.merge_alpha
    _refuse_if(
        alpha is not None and sync.merge not in (None, "alpha"),
        f"sync.merge_alpha={alpha} can't be used with sync.merge={sync.merge!r}, which has no alpha. Use one of the "
        "two.",
    )
    usual = "rebase" if algorithm == "streaming" and alpha is None else "alpha"
    rule = sync.merge or usual
    MERGE_RULES.check(rule)
    _refuse_if(
        rule == "rebase" and algorithm == "diloco",
        "sync.merge='rebase' can't be used with algorithm='diloco', which merges in the step in which it sends and so "
        "has nothing to rebase. Use --algorithm streaming.",
    )
    if rule != "alpha":
        return rule, None
    return rule, alpha or 0.0


def _fragments_and_overlap(settings: RunSettings, num_layers: int | None) -> tuple[int, int]:
    """Return P and tau, after checking P, H and tau against each other and the layers."""
    sync, algorithm = settings.sync, settings.algorithm
    streaming, longest_cycle = algorithm == "streaming", max(1, sync.inner_steps)
    number, overlap = sync.num_fragments or (None if streaming else 1), sync.overlap_steps
    _refuse_if(
        algorithm == "diloco" and number != 1,
        f"{number} fragments can't be used with algorithm='diloco', which sends the whole model at once. Use "
        "--algorithm streaming.",
    )
    if number is None:
        if num_layers is None:
            raise ConfigurationError("sync.num_fragments must be set, because the depth of this model is unknown.")
        # one fragment more for the parameters outside layers; at most H, so that no two share a step
        number = min(math.ceil(num_layers / LAYERS_PER_FRAGMENT) + 1, longest_cycle)
    if num_layers is not None and sync.fragment_strategy != "balanced":
        _refuse_if(
            number - 1 > num_layers,
            f"sync.num_fragments={number} is too many for a model of {num_layers} layers. Use 1 to "
            f"{min(num_layers + 1, longest_cycle)}, or --sync.fragment-strategy balanced, which may split layers.",
        )
    if overlap is None:
        overlap = 1 if streaming and sync.inner_steps > 1 else 0
    # the constructor checks the values
    schedule = SyncSchedule(inner_steps=sync.inner_steps, num_fragments=number, overlap_steps=overlap)
    _refuse_if(
        schedule.whole_round_late and _merge(settings)[0] == "alpha",
        f"sync.overlap_steps={overlap}, a whole round late, can't be used with sync.merge='alpha', which drops what "
        "was trained since the fragment was sent: here everything. Use --sync.merge rebase, or fewer overlap steps.",
    )
    return number, overlap


@dataclass(frozen=True)
class _Need:
    """A setting that only works with some values of another one, unless it has a value that always works."""

    key: str
    other: str  # the key of the setting that it depends on
    works: tuple[str, ...]  # the values of that one with which it works
    always: tuple[object, ...] = ()  # its own values that always work; none: all that are false
    attribute: str = ""  # of its section, where its value is, if not at its key

    def check(self, settings: RunSettings) -> None:
        section, _, _ = self.key.partition(".")
        name = f"{section}.{self.attribute}" if self.attribute else self.key
        value, choice = attrgetter(name)(settings), attrgetter(self.other)(settings)
        is_used = value not in self.always if self.always else bool(value)
        _refuse_if(
            is_used and choice not in self.works,
            f"{self.key}={value!r} can't be used with {self.other}={choice!r}. Leave it out, or use "
            f"--{self.other.rpartition('.')[2]} {' or '.join(self.works)}.",
        )


_OUTER_LOOPS = ("streaming", "diloco")
_NEEDS = (
    _Need("sync.average", "algorithm", _OUTER_LOOPS, always=("mean",)),
    _Need(
        "sync.arguments.average.codec",
        "algorithm",
        _OUTER_LOOPS,
        always=("auto", "float32"),
        attribute="mean_codec",
    ),
    _Need("sync.arguments.average.max_norm", "algorithm", _OUTER_LOOPS, attribute="max_norm"),
    _Need("sync.arguments.average.at_home", "algorithm", _OUTER_LOOPS, attribute="at_home"),
    _Need("sync.merge_alpha", "algorithm", ("streaming",)),
    _Need("sync.overlap_steps", "algorithm", ("streaming",)),
    _Need("network.straggler", "network.transport", transports(elastic=True), always=("wait",)),
    _Need("network.run", "network.transport", transports(elastic=True)),
    _Need("network.allow", "network.transport", transports(elastic=True)),
    _Need("network.announce", "network.transport", transports(elastic=True)),
    _Need("network.replica", "network.transport", transports(meets=True), always=(None,)),
    _Need("network.replica_size", "network.transport", transports(replicas_of_ranks=True), always=(1,)),
    _Need("network.join", "network.transport", transports(meets=True)),
    _Need("network.listen", "network.transport", transports(meets=True)),
    _Need("network.secret_file", "network.transport", transports(meets=True)),
    # replicas that join and leave can't average gradients at every step
    _Need("algorithm", "network.transport", transports(elastic=False), always=_OUTER_LOOPS),
    _Need("data.local", "network.transport", transports(alone=False)),
    _Need("network.on_loss", "network.transport", transports(goes_on=True), always=("stop",)),
)


def _check_together(settings: RunSettings) -> None:
    """Refuse what the chosen algorithm or transport does not support."""
    network, sync = settings.network, settings.sync
    for need in _NEEDS:
        need.check(settings)
    _refuse_if(
        bool(sync.at_home) and settings.train.data_parallel_steps > 0,
        f"sync.arguments.average.at_home can't be used with train.data_parallel_steps="
        f"{settings.train.data_parallel_steps}: such steps average all gradients. Use --data-parallel-steps 0.",
    )
    _refuse_if(
        sync.max_norm is not None and network.replica_size > 1 and settings.train.parallelism == "fsdp",
        f"sync.arguments.average.max_norm={sync.max_norm} needs whole contributions, but with train.parallelism='fsdp' "
        f"and network.replica_size={network.replica_size} each rank has only shards. "
        "Use --transport torch --train.parallelism ddp.",
    )
    _refuse_if(
        network.traits.meets and network.replica_size > 1 and settings.train.parallelism == "ddp",
        f"train.parallelism='ddp' can't be used with network.transport={network.transport!r}, over which each rank "
        "sends its own shard. Use --train.parallelism fsdp, or --transport torch.",
    )
    if network.elastic:
        _refuse_if(
            settings.data.streaming and not settings.data.local,
            "data.streaming=True can't be used with network.transport='swarm', whose replicas join and leave: what is "
            "read while training can't be divided anew. Leave it out, or tokenise the data before (diloco tokenize).",
        )
        _refuse_if(
            network.run is None,
            "network.transport='swarm' needs the name of the run. Use --run NAME, the same for all peers of the run.",
        )
        _refuse_if(
            network.min_replicas > network.replicas,
            f"network.replicas must be at least network.min_replicas={network.min_replicas}, got {network.replicas}. "
            f"Use --replicas {network.min_replicas} or more.",
        )


def _refuse_if(wrong: bool, message: str) -> None:
    if wrong:
        raise ConfigurationError(message)


def _check_lengths(settings: RunSettings, longest: int | None) -> None:
    """Check numbers of steps and tokens against each other, and the ``longest`` sequence if it is known."""
    train, model, steps = settings.train, settings.model, settings.train.steps
    if longest is None and model.source is None:
        longest = model.decoder.max_sequence_length
    limit = (
        f"the {longest} tokens of {model.source}" if model.source else f"model.arguments.max_sequence_length={longest}"
    )
    _refuse_if(
        longest is not None and train.sequence_length > longest,
        f"train.sequence_length={train.sequence_length} exceeds {limit}. Use at most {longest}, or a model that "
        "supports longer sequences.",
    )
    _refuse_if(
        train.batch_size % train.gradient_accumulation != 0,
        f"train.gradient_accumulation={train.gradient_accumulation} must divide train.batch_size={train.batch_size}.",
    )
    for name in ("train.data_parallel_steps", "train.stop_after", "optimizer.warmup_steps"):
        value = attrgetter(name)(settings) or 0
        _refuse_if(value > steps, f"{name} must be at most train.steps={steps}, got {value}.")
