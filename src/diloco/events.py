"""Facts that a trainer states about a run. The algorithm emits nothing; ``train`` emits; ``monitor`` only listens.

Every event is a frozen dataclass of plain values. ``to_record`` gives the flat dictionary that becomes one line of
``metrics.jsonl``: its keys are the field names, plus ``event`` (the class name) and ``schema`` (`SCHEMA_VERSION`).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "SCHEMA_VERSION",
    "CheckpointSaved",
    "Evaluated",
    "Event",
    "Interrupted",
    "Note",
    "RoundCommitted",
    "RoundSent",
    "RoundVoid",
    "RunFinished",
    "RunStarted",
    "SampleGenerated",
    "Sink",
    "StateFetched",
    "StepFinished",
    "ViewChanged",
    "json_ready",
    "to_record",
]

SCHEMA_VERSION = 1
"""Version of the ``metrics.jsonl`` contract: fields may be added under one version, never renamed or removed."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fact about a run. ``step`` is the number of inner steps finished when it became true."""

    step: int


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run begins (or goes on, when ``step`` > 0)."""

    total_steps: int
    algorithm: str
    num_replicas: int
    parameters: int
    tokens_per_step: int  # tokens of one step, all replicas together
    resumed_from: str | None = None
    flops_per_token: float = 0.0  # floating-point operations of training on one token, as the model counts them
    peak_flops_per_s: float | None = None
    """What the device of this process can do at most; None where it is not known, or is no GPU."""
    data_parallel_bytes_per_step: int | None = None
    """What one replica would send in each step of data-parallel training, at least."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Everything derived, as name -> readable value, in the order to print it."""


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """One inner step of every replica of this process is done."""

    loss: float  # mean training loss over the replicas of this process, nats per token
    learning_rate: float
    gradient_norm: float  # mean over replicas of the global gradient norm before clipping
    tokens: int  # tokens seen so far, all replicas together
    step_s: float  # wall-clock time of this step, in seconds
    sent_bytes: int  # sent so far by one replica (the mean over the replicas of this process)
    received_bytes: int
    compute_utilization: float  # compute time / (compute time + time waiting for communication), so far; 0..1
    skipped_replicas: int = 0  # replicas whose inner step the gradient scaler skipped (float16 only)
    trained: bool = True
    """False where this process left the step out, being slower than others (dynamic steps) or late (grace); loss,
    learning rate and gradient norm are then those of the last step that it trained."""
    pace: float = 1.0  # fraction of the scheduled steps that this process trains now (dynamic steps)
    model_flops_utilization: float | None = None
    """What the model's operations in this step are of what the device of this process could have done in ``step_s``;
    None where that is not known, and for a step that was left out."""


@dataclass(frozen=True, kw_only=True)
class RoundSent(Event):
    """One replica has handed its contribution to the transport."""

    replica: int
    fragment: int
    outer_step: int
    payload_bytes: int
    saturated: bool = False  # true when a value lay outside the codec's range and was clamped to its limit
    digest: str = ""
    """Of the fragment's global parameters and outer state that it was computed from: the same on all contributors."""
    weight: float = 1.0  # in the mean: 1 for a replica that trained every step since its last contribution that counted


@dataclass(frozen=True, kw_only=True)
class RoundCommitted(Event):
    """One replica has applied the outer step of a round and merged the result."""

    replica: int
    fragment: int
    outer_step: int
    contributors: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    wait_s: float
    clipped: tuple[int, ...] = ()  # contributors whose contributions were scaled down for being too large
    note: str = ""  # who was left out of the mean, or whose messages were refused, and why; empty when all was well
    mean_norm: float | None = None
    """L2 norm of the mean pseudo-gradient. This and what follows is None where `outer.telemetry` is off, and where
    it is not defined; all but this one are estimated from samples of the fragment."""
    mean_cosine: float | None = None
    """Cosine between this mean and the fragment's last one; None for the first round of a process."""
    momentum_cosine: float | None = None
    """Cosine between this mean and the outer momentum that it met; None without momentum, and in the first round."""
    gain: float | None = None
    """How far the global parameters moved along the mean, in lengths of the mean: the gain in effect."""
    spread: float | None = None
    """How far contributions lie from their mean (root mean square), in lengths of the mean: 0 where all are the same,
    sqrt(M - 1) where they have nothing in common. None where no replica has them whole (reduce-scatter)."""
    late_s: tuple[float, ...] = ()
    """Of each of `contributors`, how many seconds after the first one this replica heard of it, by its own clock; empty
    where all replicas are in one process."""


@dataclass(frozen=True, kw_only=True)
class RoundVoid(Event):
    """Nobody applied a round; its work is in the fragment's next pseudo-gradient."""

    replica: int
    fragment: int
    outer_step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ViewChanged(Event):
    """Other replicas take part from now on."""

    replica: int  # who says it
    view: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]  # members before that are none any more, whatever the reason
    lost: tuple[int, ...] = ()  # those of them that did not say that they leave
    reason: str


@dataclass(frozen=True, kw_only=True)
class StateFetched(Event):
    """How much has come of the others' state that this process takes over: about once a second, and with each fragment.

    Bytes are those of tensors; where the transport does not count what is on its way, fragments come all at once.
    """

    fragment: int  # the one that is being fetched, or is here
    fragment_received_bytes: int
    fragment_expected_bytes: int
    received_bytes: int  # of all fragments
    expected_bytes: int
    here: bool = False  # whether the fragment has been taken over


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Held-out evaluation of the global parameters."""

    heldout_loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    heldout_tokens: int
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A complete checkpoint stands at ``path``."""

    path: str
    size_bytes: int
    save_s: float
    free_bytes: int | None = None  # what its disk has left


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """A signal asked the run to stop; the state has been saved."""

    signal: str


@dataclass(frozen=True, kw_only=True)
class SampleGenerated(Event):
    """Text generated by the global parameters."""

    prompt: str
    text: str
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """A sentence worth telling once."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The run is over; ``summary`` is what ``summary.json`` holds."""

    summary: Mapping[str, Any]


class Sink(Protocol):
    """Something that listens. It may neither block training nor raise into it."""

    def handle(self, event: Event) -> None:
        """Take note of ``event``. Called in the order the events became true."""

    def close(self) -> None:
        """Write out what is left; no event follows."""


def to_record(event: Event) -> dict[str, Any]:
    """The event as a flat dictionary of JSON-ready values.

    >>> to_record(Note(step=3, text="hello"))
    {'schema': 1, 'event': 'Note', 'step': 3, 'text': 'hello'}
    """
    return {"schema": SCHEMA_VERSION, "event": type(event).__name__, **dataclasses.asdict(event)}


def json_ready(value: Any) -> Any:
    """``value`` for JSON, which has no NaN: a float that is not finite becomes "NaN", "Infinity" or "-Infinity".

    >>> json_ready({"loss": float("nan"), "members": (0, 1)})
    {'loss': 'NaN', 'members': [0, 1]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
