"""The runs that are compared. Each takes seconds and covers a code path that no other run here covers."""

from __future__ import annotations

import json
import random
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diloco.model import get_preset, preset_names

__all__ = ["CASES", "NORMED", "Case", "write_text"]

COMMON = """
 --device cpu --sequence-length 16 --batch-size 2 --train.gradient-accumulation 1
--inner-steps 4 --evaluation.every-steps 5 --evaluation.sequences 8
--checkpoint.every-steps 0 --monitor.console quiet
"""
SMALL = "--replicas 2 --steps 14 --data-parallel-steps 0 --learning-rate 1e-2 --optimizer.warmup-steps 2"
DECODER = "--model.arguments {layers=2,width=16,ffn_width=32,heads=2}"
STREAMING = "--fragments 3 --overlap-steps 2"
FEEDBACK = f"{STREAMING} --error-feedback 1"
NORMED = f"--model {Path(__file__).with_name('normed.py')}:normed"
IN_FLIGHT = 9
"""A step after which, with H = 4, P = 3 and tau = 2, a fragment is in flight."""

Transport = Literal["in-process", "torch", "hivemind"]


@dataclass(frozen=True)
class Case:
    """One run of `diloco train`.

    Args:
        name: a unique name.
        flags: the arguments of the command.
        transport: in-process: all replicas in one process; torch: the command starts the others; hivemind: two peers.
        stop_after: the step after which the run is also stopped, to be resumed. Swarms are not resumed: they end
            differently by design, because peers that rejoin start with fresh inner optimizers.
    """

    name: str
    flags: str
    transport: Transport = "in-process"
    stop_after: int | None = None

    @property
    def folder(self) -> str:
        """The name of its folder, which depends on the flags."""
        return f"{self.name.replace(' ', '-')}-{zlib.crc32(self.flags.encode()):08x}"

    def arguments(self, text: Path) -> list[str]:
        """Return the arguments of the command, without the folder."""
        flags = shlex.split(f"{COMMON} {self.flags} --transport {self.transport}")
        return ["train", *flags, "--data", str(text)]


def small(name: str, flags: str, transport: Transport = "in-process", stop_after: int | None = None) -> Case:
    """Return a case with the small decoder, unless ``flags`` select another model."""
    model = "" if NORMED in flags else DECODER
    return Case(name, f"{SMALL} {model} {flags}", transport, stop_after)


def presets() -> list[Case]:
    """Return each preset for ten steps. Those larger than 14m get at most eight layers and heads of eight channels."""
    common = "--steps 10 --model.arguments.vocab-size 270 --replicas 2"
    cases = []
    for name in preset_names():
        model = get_preset(name).model
        sizes = {"layers": min(model.layers, 8), "width": 8 * model.heads, "ffn-width": 16 * model.heads}
        smaller = "" if name in ("tiny", "2m", "14m") else " ".join(f"--model.{key} {n}" for key, n in sizes.items())
        cases.append(Case(f"preset {name}", f"--preset {name} {common} {smaller}"))
    return cases


def faults() -> list[Case]:
    """Return cases with failing rounds: of two replicas, and of three replicas of which two are enough."""
    where = "replica=1 fragment=1 outer_step=1"
    kinds = {"drop": "", "truncate": "", "non-finite": "", "miss-commit": "", "late": " seconds=900"}
    two = [
        small(f"fault {kind}", f"{FEEDBACK} --transport.faults '{kind} {where}{more}'", stop_after=IN_FLIGHT)
        for kind, more in kinds.items()
    ]
    enough = f"{FEEDBACK} --replicas 3 --transport.min-contributors 2 --transport.faults 'drop {where}'"
    buffers = f"{NORMED} --replicas 3 --transport.min-contributors 2 --fragments 2 --transport.faults 'drop {where}'"
    return [*two, small("fault drop, two of three", enough), small("fault drop, two of three, buffers", buffers)]


CASES = (
    *presets(),
    small("streaming", STREAMING, stop_after=IN_FLIGHT),
    small("diloco", "--algorithm diloco", stop_after=6),
    small("data-parallel", "--algorithm data-parallel", stop_after=6),
    small("no averaging", "--algorithm none"),
    small("shared start", f"{STREAMING} --data-parallel-steps 3", stop_after=2),
    *(small(f"codec {name}", f"{STREAMING} --codec {name}") for name in ("float32", "float16", "bfloat16", "int8")),
    small("codec int8, error feedback", f"{FEEDBACK} --codec int8"),
    small("codec fp4, error feedback", FEEDBACK, stop_after=IN_FLIGHT),
    small("merge alpha 0.5", f"{STREAMING} --merge-alpha 0.5", stop_after=IN_FLIGHT),
    small("outer adam, three replicas", f"{STREAMING} --sync.outer adam --replicas 3", stop_after=IN_FLIGHT),
    small("outer sgd, cosine", f"{STREAMING} --sync.outer sgd --sync.arguments.outer.schedule cosine"),
    small("outer momentum warm-up", f"{STREAMING} --sync.arguments.outer.momentum-warmup 3"),
    small("clipped", f"{STREAMING} --sync.arguments.average.max-norm 0.01 --replicas 3"),
    small("buffers", f"{NORMED} --fragments 2 --overlap-steps 2", stop_after=IN_FLIGHT),
    small("buffers, data-parallel", f"{NORMED} --algorithm data-parallel"),
    small("fragments in sequence", "--model.arguments.layers 6 --fragments 3 --sync.fragment-strategy sequential"),
    small(
        "links",
        f"{STREAMING} --emulate.bandwidth 1e6 --emulate.latency 0.05 --emulate.step-time 0.1",
        stop_after=IN_FLIGHT,
    ),
    *faults(),
    small("float16", f"{STREAMING} --precision float16", stop_after=IN_FLIGHT),
    small(
        "bfloat16, accumulated, recomputed",
        "--precision bfloat16 --train.gradient-accumulation 2 --train.activation-checkpointing full",
    ),
    small("documents apart, contiguous", "--train.document-masks --data.sharding contiguous"),
    small("read while training", f"{STREAMING} --data.streaming --data.streaming-block 4", stop_after=IN_FLIGHT),
    small("byte-pair encoding", "--tokenizer bpe:270 --optimizer.schedule wsd"),
    small("torch float32, alpha", f"{STREAMING} --codec float32 --merge-alpha 0.5", "torch", IN_FLIGHT),
    small("torch int8, error feedback", f"{FEEDBACK} --codec int8 --data-parallel-steps 2", "torch", IN_FLIGHT),
    small(
        "torch fp4, buffers, clipped",
        f"{NORMED} --fragments 2 --codec fp4 --sync.arguments.average.max-norm 0.01",
        "torch",
    ),
    small("torch data-parallel", "--algorithm data-parallel --steps 6", "torch"),
    small("torch, two ranks, fsdp", f"{STREAMING} --replica-size 2", "torch", IN_FLIGHT),
    small("torch, two ranks, ddp", f"{STREAMING} --replica-size 2 --train.parallelism ddp", "torch", IN_FLIGHT),
    small("hivemind float32", f"{STREAMING} --codec float32", "hivemind"),
    small("hivemind int8, alpha", f"{STREAMING} --codec int8 --merge-alpha 0.5", "hivemind"),
    small("hivemind fp4, error feedback", FEEDBACK, "hivemind"),
)


def write_text(path: Path) -> Path:
    """Write short documents, always the same ones."""
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    texts = (" ".join(rng.choice(words) for _ in range(30)) + f" {number}." for number in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path
