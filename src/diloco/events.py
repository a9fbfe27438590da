"""The events that report the progress of a run, and the `Sink` protocol of their consumers.

``outer`` and ``train`` emit events, ``monitor`` and ``watch`` consume them. Every event is a frozen dataclass of plain
values. `to_record` turns it into the flat dictionary that becomes one line of ``metrics.jsonl``: its keys are the field
names, plus ``event`` (the class name) and ``schema`` (`SCHEMA_VERSION`).

A new metric is a field with a `diloco.metrics.Metric` in its annotation, and the code that knows its value: whatever
shows metrics then shows it.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta

from diloco.metrics import Measurement, Metric, measured, metrics_of

SCHEMA_VERSION = 1
"""The version of the ``metrics.jsonl`` schema. Within one version, fields may be added but never renamed or removed."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base class of all events. ``step`` is the number of inner steps finished when the event happened."""

    step: int


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run starts, or resumes if ``step`` > 0."""

    total_steps: int
    algorithm: str
    num_replicas: int
    parameters: int
    tokens_per_step: int  # tokens in one step, over all replicas
    resumed_from: str | None = None
    flops_per_token: float = 0.0  # floating-point operations to train on one token, as the model counts them
    peak_flops_per_s: float | None = None
    """The peak throughput of this process's device, or None if it is unknown or the device is not a GPU."""
    data_parallel_bytes_per_step: int | None = None
    """A lower bound on the bytes that one replica would send in each step of data-parallel training."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What tells the user that this is the right run, as name -> readable value, in the order to print it."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further facts about the run and this process, which the console does not print."""
    names: Mapping[str, str] = field(default_factory=dict)  # the names of replicas that have one, by number
    best_heldout_loss: float | None = None  # the lowest held-out loss before this start, if the run resumes
    shared_start_steps: int = 0  # the number of steps, from the first one, that average gradients
    # before this start, as all that follow
    rounds_committed: Annotated[int, Metric("Committed rounds", kind="total")] = 0
    rounds_void: Annotated[int, Metric("Void rounds", kind="total")] = 0
    tokens: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """Every replica of this process has finished one inner step."""

    loss: Annotated[float, Metric("Training loss", "nats per token", of_model=True, column="loss")]
    """The mean over the replicas of this process."""
    learning_rate: Annotated[float, Metric("Learning rate")]
    gradient_norm: Annotated[float | None, Metric("Gradient norm before clipping", of_model=True)]
    """The mean over replicas; None if it is unknown, as for the next one."""
    tokens: Annotated[int | None, Metric("Tokens trained by all replicas", "tokens", "total")]
    step_s: Annotated[float, Metric("Time of a step", "s", "rate")]
    # of all replicas; None if it is unknown
    tokens_per_s: Annotated[
        float | None, Metric("Throughput of all replicas", "tokens per second", "rate", column="tokens/s")
    ] = None
    model_flops_utilization: Annotated[
        float | None, Metric("Model FLOPs utilisation", "share", "rate", column="MFU")
    ] = None
    """The model's operations in this step, as a fraction of what the device of this process could have done in
    ``step_s``; None if the peak is unknown or the step was skipped."""
    # so far by one replica, the mean over the replicas of this process
    sent_bytes: Annotated[int, Metric("Sent by one replica", "bytes", "total", column="sent")]
    received_bytes: Annotated[int, Metric("Received by one replica", "bytes", "total")]
    # compute time / (compute time + time waiting for communication), so far; 0..1
    compute_utilization: Annotated[float, Metric("Compute utilisation", "share", column="compute")]
    skipped_replicas: int = 0  # replicas whose inner step the gradient scaler skipped (float16 only)
    trained: bool = True
    """False if this process skipped the step because it is slower than others (dynamic steps). Loss, learning
    rate and gradient norm are then those of the last step that it trained."""
    pace: float = 1.0  # fraction of the scheduled steps that this process currently trains (dynamic steps)
    epoch: int = 1  # the pass over the data, or over the source that has been read most often


@dataclass(frozen=True, kw_only=True)
class RoundSent(Event):
    """One replica has passed its contribution to the transport."""

    replica: int
    fragment: int
    outer_step: int
    payload_bytes: int
    saturated: bool = False  # whether a value was outside the codec's range and was clamped to its limit
    digest: str = ""
    """The digest of the fragment's global parameters and outer state that the contribution was computed from. It is the
    same on all contributors."""
    weight: float = 1.0  # weight in the mean: 1 if the replica trained every step since it last counted in a mean


class PeerTraffic(NamedTuple):
    """What a connection to another replica has carried since it began."""

    # payload bytes, as they were on the wire
    sent_bytes: Annotated[int, Metric("Sent to a peer", "bytes", "counter", name="peer_sent_bytes")]
    received_bytes: Annotated[int, Metric("Received from a peer", "bytes", "counter", name="peer_received_bytes")]
    # the shortest one; None if it is unknown
    round_trip_s: Annotated[float | None, Metric("Round trip to a peer", "s", name="peer_round_trip_s")]


class Arrival(NamedTuple):
    """When a contribution came."""

    # by this replica's clock
    late_s: Annotated[float, Metric("Contribution of a peer after the first one", "s", name="peer_late_s")]


@dataclass(frozen=True, kw_only=True)
class RoundCommitted(Event):
    """One replica has applied the outer step of a round and merged the result."""

    replica: int
    fragment: int
    outer_step: int
    contributors: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    wait_s: Annotated[float, Metric("Wait for a mean", "s", "part")]
    clipped: tuple[int, ...] = ()  # contributors whose contributions were scaled down for being too large
    note: str = ""  # replicas left out of the mean or whose messages were refused, with reasons; else empty
    choice: str = ""  # what slow uplinks have changed in the exchange, and what that costs; else empty
    mean_norm: Annotated[float | None, Metric("Norm of the mean pseudo-gradient", of_model=True)] = None
    """The L2 norm. This field and the following ones up to ``gain`` are None if the value is undefined. All but this
    one are estimated from samples of the fragment."""
    mean_cosine: Annotated[float | None, Metric("Cosine with the previous mean", "cosine", of_model=True)] = None
    """Of the fragment; None in the first round of a process."""
    momentum_cosine: Annotated[float | None, Metric("Cosine with the outer momentum", "cosine", of_model=True)] = None
    """The cosine between this mean and the outer momentum before the step; None without momentum and in the first
    round."""
    gain: Annotated[float | None, Metric("Effective gain", "norms of the mean", of_model=True)] = None
    """How far the global parameters moved along the mean, as a multiple of the mean's norm."""
    late_s: tuple[float, ...] = ()
    """For each of `contributors`, the seconds by this replica's clock between the first contribution and this one.
    Empty if all replicas are in one process."""
    view: int = 0  # the number of the view whose members took part
    total_weight: float = 0.0  # the sum of the contributors' weights, by which the sum was divided
    weight: float = 0.0  # this replica's own, and the digest that `RoundSent` has
    digest: str = ""
    peers: Mapping[str, PeerTraffic] = field(default_factory=dict)
    """Each connected replica, by number. Empty within one process."""


@dataclass(frozen=True, kw_only=True)
class RoundVoid(Event):
    """A round was void: no replica applied it. Its work stays in the fragment's next pseudo-gradient."""

    replica: int
    fragment: int
    outer_step: int
    reason: str  # without the name of the round
    view_changed: bool = False  # whether that is a change of the members, which `ViewChanged` reports


@dataclass(frozen=True, kw_only=True)
class ViewChanged(Event):
    """A new view is installed: the set of participating replicas has changed."""

    replica: int  # the replica that reports the change
    view: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]  # members of the previous view that are not in this one, for any reason
    lost: tuple[int, ...] = ()  # those of `left` that did not announce their departure
    reason: str  # with all details
    cause: str = "other"  # the same, as a `diloco.membership.Cause`
    names: Mapping[str, str] = field(default_factory=dict)  # the names of replicas that have one, by number


@dataclass(frozen=True, kw_only=True)
class Lost(Event):
    """This replica has lost the others and searches for them; it trains again with its next `StepFinished`."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class StateFetched(Event):
    """The progress of this process in fetching state from other replicas. Emitted about once a second and per fragment.

    Byte counts cover tensors only. If the transport does not report partial progress, a fragment's count jumps from
    zero to its full size.
    """

    fragment: int  # the fragment that is being fetched, or that has just been adopted
    fragment_received_bytes: int
    fragment_expected_bytes: int
    received_bytes: int  # over all fragments
    expected_bytes: int  # over all fragments
    here: bool = False  # whether this process has adopted the fragment


class Site(NamedTuple):
    """All that a replica with data of its own (`data.local`) tells the others of that data."""

    step: Annotated[int, Meta(ge=0, le=1 << 53)]  # inner steps that it had finished when it evaluated
    # of the global parameters on its held-out data; None: nothing is held out
    loss: Annotated[
        Annotated[float, Meta(ge=0, le=1e30)] | None,
        Metric("Held-out loss on own data", "nats per token", of_model=True, name="replica_loss"),
    ]
    # of its data that it has trained on
    tokens: Annotated[int, Meta(ge=0, le=1 << 53), Metric("Tokens of own data", "tokens", name="replica_tokens")]
    # over its data
    passes: Annotated[float, Meta(ge=0, le=1e30), Metric("Passes over own data", name="replica_passes")]


def mean_loss(sites: Mapping[str, Site]) -> float | None:
    """Return the mean of the sites' losses by the tokens that each has trained on; None if none is known.

    >>> mean_loss({"0": Site(5, 1.0, 300, 0.5), "1": Site(5, 2.0, 100, 2.5), "2": Site(5, None, 900, 1.0)})
    1.25
    """
    known = [(site.loss, max(1, site.tokens)) for site in sites.values() if site.loss is not None]
    if not known:
        return None
    return sum(loss * tokens for loss, tokens in known) / sum(tokens for _, tokens in known)


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Held-out evaluation of the global parameters."""

    heldout_loss: Annotated[float, Metric("Held-out loss", "nats per token", of_model=True)]
    perplexity: Annotated[float, Metric("Held-out perplexity", of_model=True)]
    bits_per_byte: Annotated[float, Metric("Held-out bits per byte", of_model=True)]
    heldout_tokens: int
    final: bool = False
    # what follows is known where each replica has data of its own (`data.local`)
    # of this replica's own local parameters on the same data
    local_loss: Annotated[
        float | None, Metric("Held-out loss of local parameters", "nats per token", of_model=True)
    ] = None
    sites: Mapping[str, Site] = field(default_factory=dict)  # by replica, the newest of each member
    # `mean_loss` of these
    sites_loss: Annotated[float | None, Metric("Held-out loss over all own data", "nats per token", of_model=True)] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A complete checkpoint has been written to ``path``."""

    path: str
    size_bytes: Annotated[int, Metric("Size of a checkpoint", "bytes", name="checkpoint_size_bytes")]
    save_s: Annotated[float, Metric("Time to save a checkpoint", "s", name="checkpoint_save_s")]
    # free space left on its disk
    free_bytes: Annotated[int | None, Metric("Free space for checkpoints", "bytes", name="checkpoint_free_bytes")] = (
        None
    )


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
    """A message for the user that is emitted once."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The run has ended; ``summary`` is the content of ``summary.json``."""

    summary: Mapping[str, Any]


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for kind in (RunStarted, StepFinished, RoundCommitted, PeerTraffic, Arrival, Evaluated, Site, CheckpointSaved)
    for metric in metrics_of(kind).values()
}
"""All metrics by name."""


class Measurements:
    """What the events of one process measure. A round counts once, though each of its replicas reports it."""

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}  # fragment -> its newest outer step

    def of(self, event: Event) -> Iterator[Measurement]:
        """Yield what ``event`` measures: of a fragment, a peer or a replica, if it is about one of several."""
        match event:
            case RunStarted():  # it has what was measured before
                self._rounds.clear()
            case RoundCommitted():
                if event.outer_step > self._rounds.get(event.fragment, -1):
                    self._rounds[event.fragment] = event.outer_step
                    yield from _of_round(event)
            case Evaluated():
                yield from measured(event)
                for replica, site in event.sites.items():
                    yield from measured(site, "replica", replica)
            case _:
                yield from measured(event)


def _of_round(event: RoundCommitted) -> Iterator[Measurement]:
    yield from measured(event, "fragment", str(event.fragment))
    for peer, traffic in event.peers.items():
        yield from measured(traffic, "peer", peer)
    for contributor, late_s in zip(event.contributors, event.late_s, strict=False):
        yield from measured(Arrival(late_s), "peer", str(contributor))


class Sink(Protocol):
    """A consumer of events. `handle` must not block training or raise."""

    def handle(self, event: Event) -> None:
        """Process ``event``. Events arrive in the order in which they happened."""

    def close(self) -> None:
        """Write what is still buffered. No event follows."""


def to_record(event: Event) -> dict[str, Any]:
    """Return the event as a flat dictionary. `json_ready` makes its values fit for JSON.

    >>> to_record(Note(step=3, text="hello"))
    {'schema': 1, 'event': 'Note', 'step': 3, 'text': 'hello'}
    """
    return {"schema": SCHEMA_VERSION, "event": type(event).__name__, **dataclasses.asdict(event)}


def json_ready(value: Any) -> Any:
    """Convert ``value`` for JSON, which has no NaN: non-finite floats become "NaN", "Infinity" or "-Infinity".

    >>> json_ready({"loss": float("nan"), "members": (0, 1)})
    {'loss': 'NaN', 'members': [0, 1]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return what `json_ready` makes of ``value`` as JSON: every text for other programs comes from here.

    >>> to_json({"perplexity": math.inf})
    '{"perplexity": "Infinity"}'
    """
    return json.dumps(json_ready(value), indent=indent, allow_nan=False)
