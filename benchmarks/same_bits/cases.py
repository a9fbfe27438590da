"""The runs that are compared. Each takes seconds and covers a code path that no other run here covers."""

import json
import random
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.model import PRESETS, get_preset

Settings = Mapping[str, Any]

COMMON: Settings = {
    "train.device": "cpu",
    "train.sequence_length": 16,
    "train.batch_size": 2,
    "train.gradient_accumulation": 1,
    "sync.inner_steps": 4,
    "evaluation.every_steps": 5,
    "evaluation.sequences": 8,
    "evaluation.sample_prompts": [],
    "checkpoint.every_steps": 0,
    "monitor.console": "quiet",
}
DECODER: Settings = {f"model.arguments.{name}": n for name, n in
                     {"layers": 2, "width": 16, "ffn_width": 32, "heads": 2}.items()}  # fmt: skip
SMALL: Settings = {
    "network.replicas": 2,
    "train.steps": 14,
    "train.data_parallel_steps": 0,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 2,
}
NORMED = f"{Path(__file__).with_name('normed.py')}:normed"
IN_FLIGHT = 9
"""A step after which, with H = 4, P = 3 and tau = 2, a fragment is in flight."""


@dataclass(frozen=True)
class Case:
    """One run of `diloco train`.

    Args:
        name: a unique name.
        settings: key -> value.
        stop_after: the step after which the run is also stopped, to be resumed. Swarms are not resumed: they end
            differently by design, because peers that rejoin start with fresh inner optimizers.
    """

    name: str
    settings: Settings
    stop_after: int | None = None

    @property
    def transport(self) -> str:
        """in-process: all replicas in one process; tcp: the command starts the others; torch: torchrun does; swarm: two
        peers."""
        return str(self.settings.get("network.transport", "in-process"))

    @property
    def replicas(self) -> int:
        return int(self.settings.get("network.replicas", 1))

    @property
    def replica_size(self) -> int:
        return int(self.settings.get("network.replica_size", 1))

    @property
    def stop(self) -> tuple[str, ...]:
        """The arguments that stop the run after `stop_after`."""
        return () if self.stop_after is None else ("--stop-after", str(self.stop_after))

    @property
    def folder(self) -> str:
        """The name of its folder, which depends on the settings."""
        return f"{self.name.replace(' ', '-')}-{zlib.crc32(json.dumps(dict(self.settings)).encode()):08x}"

    def toml(self) -> str:
        """Return the settings as TOML."""
        rows = {**COMMON, **self.settings}
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items())  # JSON's values are TOML's


STREAMING: Settings = {"sync.num_fragments": 3, "sync.overlap_steps": 2}
FEEDBACK: Settings = {**STREAMING, "sync.error_feedback": 1.0}
ISOTROPIC: Settings = {"sync.arguments.outer.isotropic": True}
BUFFERS: Settings = {"model.source": NORMED, "sync.num_fragments": 2}
TCP: Settings = {"network.transport": "tcp"}
TORCH: Settings = {"network.transport": "torch"}
SWARM: Settings = {"network.transport": "swarm", "network.run": "same-bits", "network.listen": "127.0.0.1:0"}


def small(name: str, *parts: Settings, stop_after: int | None = None, **sync: Any) -> Case:
    """Return a case with the small decoder, unless a part selects another model; ``sync`` are settings of [sync]."""
    settings = {key: value for part in parts for key, value in part.items()}
    settings |= {f"sync.{key}": value for key, value in sync.items()}
    return Case(name, {**SMALL, **({} if "model.source" in settings else DECODER), **settings}, stop_after)


def presets() -> list[Case]:
    """Return each preset for ten steps. Those larger than 14m get at most eight layers and heads of eight channels."""
    common = {"train.steps": 10, "network.replicas": 2, "data.tokenizer": "bpe:270", "model.arguments.vocab_size": 270}
    cases = []
    for name in PRESETS:
        model = get_preset(name).model
        sizes = {"layers": min(model.layers, 8), "width": 8 * model.heads, "ffn_width": 16 * model.heads}
        smaller = {} if name in ("tiny", "2m", "14m") else {f"model.arguments.{key}": n for key, n in sizes.items()}
        cases.append(Case(f"preset {name}", {"preset": name, **common, **smaller}))
    return cases


CASES = (
    *presets(),
    small("streaming", STREAMING, stop_after=IN_FLIGHT),
    small("diloco", {"algorithm": "diloco"}, stop_after=6),
    small("data-parallel", {"algorithm": "data-parallel"}, stop_after=6),
    small("shared start", STREAMING, {"train.data_parallel_steps": 3}, stop_after=2),
    *(small(f"codec {name}", STREAMING, codec=name) for name in ("float32", "float16", "bfloat16", "int8")),
    small("codec int8, error feedback", FEEDBACK, codec="int8"),
    small("codec fp4, error feedback", FEEDBACK, stop_after=IN_FLIGHT),
    small("merge alpha 0.5", STREAMING, merge_alpha=0.5, stop_after=IN_FLIGHT),
    small("outer sgd, cosine", STREAMING, {"sync.arguments.outer.schedule": "cosine"}, outer="sgd"),
    small("outer momentum warm-up", STREAMING, {"sync.arguments.outer.momentum_warmup": 3}),
    small("isotropic means", STREAMING, ISOTROPIC, stop_after=IN_FLIGHT),
    small("clipped", STREAMING, {"sync.arguments.average.max_norm": 0.01, "network.replicas": 3}),
    small("buffers", BUFFERS, overlap_steps=2, stop_after=IN_FLIGHT),
    small("buffers, data-parallel", {"model.source": NORMED, "algorithm": "data-parallel"}),
    small(
        "links",
        STREAMING,
        {"emulate.bandwidth": ["1Mbit"], "emulate.latency": ["50ms"], "emulate.step_time": ["100ms"]},
        stop_after=IN_FLIGHT,
    ),
    small("float16", STREAMING, {"train.precision": "float16"}, stop_after=IN_FLIGHT),
    small(
        "bfloat16, accumulated, recomputed",
        {"train.precision": "bfloat16", "train.gradient_accumulation": 2, "train.activation_checkpointing": "full"},
    ),
    small("documents apart", {"data.packing": "masked"}),
    small("read while training", STREAMING, {"data.streaming": True}, stop_after=IN_FLIGHT),
    small("byte-pair encoding", {"data.tokenizer": "bpe:270", "optimizer.schedule": "wsd"}),
    small("tcp float32, alpha", STREAMING, TCP, codec="float32", merge_alpha=0.5, stop_after=IN_FLIGHT),
    small("tcp int8, error feedback", FEEDBACK, TCP, {"train.data_parallel_steps": 2}, codec="int8", stop_after=9),
    small("tcp fp4, buffers, clipped", BUFFERS, TCP, {"sync.arguments.average.max_norm": 0.01}, codec="fp4"),
    small("tcp data-parallel", TCP, {"algorithm": "data-parallel", "train.steps": 6}),
    small("swarm float32", STREAMING, SWARM, codec="float32"),
    small("swarm int8, alpha", STREAMING, SWARM, codec="int8", merge_alpha=0.5),
    small("swarm fp4, error feedback", FEEDBACK, SWARM),
)


TRANSPORTS: Mapping[str, Settings] = {"in-process": {}, "torch": TORCH, "tcp": TCP, "swarm": SWARM}
FSDP: Settings = {"network.replica_size": 2}
MUON: Settings = {"optimizer.name": "Muon"}


def over(name: str, *parts: Settings, on: Iterable[str] = TRANSPORTS, **more: Any) -> tuple[Case, ...]:
    """Return the same run over several transports."""
    return tuple(small(f"{name} over {each}", STREAMING, TRANSPORTS[each], *parts, **more) for each in on)


OF_TRANSPORTS = (
    *(over(codec, codec=codec) for codec in ("float32", "float16", "bfloat16", "int8", "fp4")),
    over("int8, error feedback", FEEDBACK, codec="int8"),
    over("isotropic means", ISOTROPIC, codec="fp4"),
    over("sign, error feedback", FEEDBACK, codec="sign"),
    over("topk2, error feedback", FEEDBACK, codec="topk2"),
    over(
        "four replicas, encoded means",
        {"network.replicas": 4, "sync.arguments.average.codec": "int8"},
        on=("in-process", "torch", "tcp"),
        codec="int8",
    ),
    over("data-parallel start", {"train.data_parallel_steps": 3}, on=("in-process", "torch", "tcp")),
    over("fp4, stopped and resumed", on=("in-process", "torch", "tcp"), stop_after=IN_FLIGHT),
    over("Muon, fp4", MUON),
    over("FSDP2", FSDP, on=("torch", "tcp")),
    over("FSDP2, stopped and resumed", FSDP, on=("torch", "tcp"), stop_after=IN_FLIGHT),
    over("FSDP2 and Muon", FSDP, MUON, on=("torch", "tcp")),
    over("FSDP2 and Muon, stopped and resumed", FSDP, MUON, on=("torch", "tcp"), stop_after=IN_FLIGHT),
)
"""Swarms resume with fresh inner optimizers by design, and one process does not shard."""


def write_text(path: Path) -> Path:
    """Write short documents, always the same ones."""
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    texts = (" ".join(rng.choice(words) for _ in range(30)) + f" {number}." for number in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
