"""The sizes of the measurements: in full, and for a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from diloco.model import DecoderSettings, get_preset

__all__ = ["FULL", "TINY", "Job", "Sizes"]


@dataclass(frozen=True)
class Job:
    """A model and its batch.

    Attributes:
        model: the sizes of the model.
        batch_size: sequences per replica and step.
        sequence_length: tokens per sequence.
        goal: the fraction of the device's peak to reach; None if there is no goal.
    """

    model: DecoderSettings
    batch_size: int
    sequence_length: int
    goal: float | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes of one benchmark run.

    Attributes:
        jobs: jobs by name; each is a part of the benchmark.
        small: the job of the replicas that share a device.
        replicas: the number of replicas that share a device.
        warmup_steps: steps before timing starts.
        steps: timed steps.
        contributors: payloads in a round.
        inner_steps: H, over which the cost of a round is spread.
        check_tokens: the length of the sequences in checks.
        check_values: the number of values that codecs are checked with.
        precision: the precision of training.
        backend: the backend of torch.compile in checks; None if nothing is to be compiled in the whole benchmark.
    """

    jobs: Mapping[str, Job]
    small: Job
    replicas: int
    warmup_steps: int
    steps: int
    contributors: int
    inner_steps: int
    check_tokens: int
    check_values: int
    precision: str = "bfloat16"
    backend: str | None = "inductor"


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
