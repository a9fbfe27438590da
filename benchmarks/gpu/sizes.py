"""The sizes of the measurements: in full, and for a test."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from diloco.model import DecoderSettings, get_preset


@dataclass(frozen=True)
class Job:
    """A model and its batch."""

    model: DecoderSettings
    batch_size: int  # sequences per replica and step
    sequence_length: int
    goal: float | None = None  # the fraction of the device's peak to reach


@dataclass(frozen=True)
class Sizes:
    """The sizes of one benchmark run."""

    jobs: Mapping[str, Job]  # each is a part of the benchmark
    small: Job  # of the replicas that share a device
    replicas: int  # that share a device
    warmup_steps: int  # before timing starts
    steps: int  # timed
    contributors: int  # payloads in a round
    inner_steps: int  # H, over which the cost of a round is spread
    check_tokens: int  # the length of the sequences in checks
    check_values: int  # with which codecs are checked
    precision: str = "bfloat16"
    backend: str | None = "inductor"  # of torch.compile in checks; None: nothing is compiled in the whole benchmark


def _preset(name: str, batch_size: int, goal: float | None = None) -> Job:
    preset = get_preset(name)
    return Job(preset.model, batch_size, preset.sequence_length, goal)


FULL = Sizes(
    jobs={"150m": _preset("150m", 64, 0.45), "1b": _preset("1b", 16, 0.50)},
    small=_preset("streaming-35m", 16),
    replicas=8,
    warmup_steps=5,
    steps=20,
    contributors=8,
    inner_steps=100,
    check_tokens=256,
    check_values=1_000_000,
)

_SMALL = DecoderSettings(layers=1, width=16, ffn_width=32, heads=2, vocab_size=64, max_sequence_length=32)

TINY = Sizes(
    jobs={"150m": Job(_SMALL, 2, 8, 0.45), "1b": Job(replace(_SMALL, kv_heads=1), 2, 8, 0.50)},
    small=Job(replace(_SMALL, qk_norm=True, tie_embeddings=True, z_loss=1e-4), 2, 8),
    replicas=1,
    warmup_steps=1,
    steps=2,
    contributors=2,
    inner_steps=4,
    check_tokens=32,
    check_values=5000,
    backend=None,
)
"""The sizes of a test: the same code in seconds, with figures that mean nothing."""
