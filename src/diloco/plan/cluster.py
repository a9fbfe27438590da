"""What replicas send, their links and speeds, and what real runs spend besides: TCP, queues and work.

The constants and the errors of predictions with them are results of benchmarks/simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.algorithm import (
    PLAIN_MEAN,
    Codec,
    MeanEncoding,
    SyncSchedule,
    Uplink,
    make_codec,
    plan_exchange,
    steps_to_train,
    trains_at,
)
from diloco.errors import ConfigurationError
from diloco.plan.tcp import CongestionControl, Tcp
from diloco.train import (
    LAYERS_PER_FRAGMENT,
    RunSettings,
    make_configured_codec,
    make_mean_encoding,
    make_schedule,
)
from diloco.transport import Link, LinkArrays, streams_to_each

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Parcel:
    """The traffic of one round of one fragment."""

    sent_bytes: Floats  # by replica, broadcastable to ``(..., M)``
    received_bytes: Floats
    numel: int = 0  # number of values in the fragment, which determines the work of encoding and merging
    # (fraction of the sending step, share of the bytes that may be sent from then on), by time; the shares add up to 1.
    # The trainer sends after the step, when the inner optimizer has updated the parameters.
    releases: tuple[tuple[float, float], ...] = ((1.0, 1.0),)


@dataclass(frozen=True)
class Traffic:
    """A schedule and the parcel of each of its fragments."""

    schedule: SyncSchedule
    parcels: tuple[Parcel, ...]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What replicas send each other, and when."""

    schedule: SyncSchedule
    fragment_sizes: tuple[int, ...]  # number of values of each fragment
    codec: Codec
    mean: MeanEncoding = PLAIN_MEAN
    whole: bool = False  # whether every replica needs whole contributions
    dynamic_steps: bool = False  # whether slow replicas skip steps
    gradients: bool = False  # whether these are the gradients of data-parallel steps, whose work is not counted

    @classmethod
    def of(cls, settings: RunSettings, fragment_sizes: Sequence[int]) -> Exchange:
        """Return the exchange of resolved ``settings`` for a model with these fragments."""
        if settings.algorithm == "data-parallel":
            return cls.of_gradients(sum(fragment_sizes), settings.sync.codec or "float32")
        return cls(
            schedule=make_schedule(settings),
            fragment_sizes=tuple(fragment_sizes),
            codec=make_configured_codec(settings.sync),
            mean=make_mean_encoding(settings.sync),
            whole=settings.sync.whole_contributions,
            dynamic_steps=settings.network.straggler == "dynamic",
        )

    @classmethod
    def of_gradients(cls, parameters: int, codec: str = "float32") -> Exchange:
        """Return the exchange of data-parallel steps, as the trainer takes them: all gradients after the step."""
        schedule = SyncSchedule(inner_steps=1)
        return cls(schedule=schedule, fragment_sizes=(parameters,), codec=make_codec(codec), gradients=True)

    def traffic(self, num_replicas: int, uplinks: Sequence[Uplink] = ()) -> Traffic:
        """Return what ``num_replicas`` replicas send, by the exchange that transports choose for their ``uplinks``.

        >>> exchange = Exchange(schedule=SyncSchedule(inner_steps=9), fragment_sizes=(1000,), codec=make_codec("fp4"))
        >>> exchange.traffic(2).parcels[0].sent_bytes
        array([504., 504.])
        """
        parcels: dict[int, Parcel] = {}
        for numel in set(self.fragment_sizes):
            plan = plan_exchange(self.codec, numel, num_replicas, mean=self.mean, whole=self.whole, uplinks=uplinks)
            parcels[numel] = Parcel(np.array(plan.sent, float), np.array(plan.received, float), numel)
        return Traffic(self.schedule, tuple(parcels[numel] for numel in self.fragment_sizes))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of equal layers that is known only by its size, and how long an inner step of it takes."""

    parameters: int  # number of trainable values, all of them in layers
    layers: int  # L
    step_time_s: float = 1.0  # compute time of one inner step

    @property
    def default_fragments(self) -> int:
        """P: one fragment per three layers."""
        return math.ceil(self.layers / LAYERS_PER_FRAGMENT)

    def fragment_layers(self, num_fragments: int) -> tuple[range, ...]:
        """Return the layers of each strided fragment (Streaming DiLoCo, Fig. 2).

        Raises:
            ConfigurationError: there are not as many layers, or not as many parameters.

        >>> Workload(parameters=10, layers=4).fragment_layers(2)
        (range(0, 4, 2), range(1, 4, 2))
        """
        if not 1 <= num_fragments <= self.layers <= self.parameters:
            raise ConfigurationError(
                f"{self.parameters} parameters in {self.layers} layers cannot be split into {num_fragments} fragments."
            )
        return tuple(range(first, self.layers, num_fragments) for first in range(num_fragments))

    def fragment_sizes(self, num_fragments: int) -> tuple[int, ...]:
        """Return the number of values in each fragment; they add up to all parameters.

        >>> Workload(parameters=10, layers=4).fragment_sizes(2)
        (4, 6)
        """
        layers = self.fragment_layers(num_fragments)
        edges = [layer * self.parameters // self.layers for layer in range(self.layers + 1)]
        return tuple(sum(edges[layer + 1] - edges[layer] for layer in fragment) for fragment in layers)


P90_QUEUE_TRIPS = 4.0  # about one round in ten loses more round trips in queues
P90_WORK = 1.25  # factor for the work at p90

ACCURACY = (
    "median error 4% of the time of a round (largest 94%) and 0.1% of the whole time (largest 14%), in 26 runs on a CPU"
)
"""The errors of predictions, in words."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The time that a run spends apart from computing and transferring bits at the link's rate.

    The defaults are the ideal of the papers and of the virtual clock: no overhead.
    """

    tcp: Tcp | None = None  # TCP of the connections; None: payload has the full rate from the start
    # round trips lost in queues while the payload fills the link; a smaller payload loses a part of them
    queue_trips: float = 0.0
    # time per value that a round takes for decoding, summing and hashing, while training continues
    average_s_per_value: float = 0.0
    # time per value that a send blocks the training loop: pseudo-gradient and encoding
    send_s_per_value: float = 0.0
    # time per value that a merge blocks the training loop: outer step and merge
    merge_s_per_value: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which replicas exchange contributions. The defaults are measured on a CPU."""

    congestion_control: CongestionControl = "cubic"  # TCP congestion control of the senders
    loss: float = 0.0  # share of packets that are lost
    average_s_per_value: float = 1.5e-9  # these three as in `Overheads`
    send_s_per_value: float = 2.5e-9
    merge_s_per_value: float = 1.9e-9

    @property
    def measures_uplinks(self) -> bool:
        """Whether replicas learn how fast they can send, so that slow ones sum less: where losses don't slow them."""
        return self.congestion_control == "bbr"

    def overheads(self, others: int, *, p90: bool = False) -> Overheads:
        """Return the overheads of a run under these conditions.

        Args:
            others: number of replicas to which a replica sends.
            p90: return values that one round in ten exceeds, instead of every other round.
        """
        slower = P90_WORK if p90 else 1.0
        connections = max(1, others) * streams_to_each(others)
        return Overheads(
            tcp=Tcp(congestion_control=self.congestion_control, loss=self.loss, connections=connections),
            queue_trips=P90_QUEUE_TRIPS if p90 else 0.0,
            average_s_per_value=slower * self.average_s_per_value,
            send_s_per_value=slower * self.send_s_per_value,
            merge_s_per_value=slower * self.merge_s_per_value,
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Replicas, their links and their speeds. Arrays may have leading scenario dimensions: ``(..., M)``."""

    links: LinkArrays
    step_time_s: Floats  # compute time of one inner step, ``(M,)``
    # H, if replicas slower than the fastest skip steps (DyLU); None: every replica trains every step
    dynamic_of: int | None = None
    overheads: Overheads = Overheads()

    @classmethod
    def of(cls, links: Sequence[Link], step_time_s: float | Sequence[float], **more: Any) -> Cluster:
        """Return a cluster with one link per replica, and one step time per replica or one for all.

        Args:
            more: the other fields.

        Raises:
            ConfigurationError: unless each replica has a link and a step time above 0.
        """
        times = [step_time_s] * len(links) if isinstance(step_time_s, int | float) else list(step_time_s)
        if len(times) != len(links) or not links or not all(0 < each < math.inf for each in times):
            raise ConfigurationError(
                f"a cluster needs one link and one step time above 0 s per replica, got {len(links)} links and the "
                f"step times {times}."
            )
        return cls(links=LinkArrays.of(links), step_time_s=np.array(times), **more)

    @property
    def used_links(self) -> LinkArrays:
        """The links with the bandwidth that TCP uses of them."""
        links, tcp = self.links, self.overheads.tcp
        if tcp is None:
            return links
        return LinkArrays(tcp.carried_bits_per_s(links.bandwidth_bits_per_s, 2 * links.latency_s), links.latency_s)

    def overhead_s(self, parcel: Parcel, links: LinkArrays) -> Floats:
        """Return the time that a round takes in addition to the transfer of its payload and a vote, ``(..., 1)``.

        Args:
            parcel: the payload of the round.
            links: `used_links`. A lone replica has no overhead.
        """
        if links.latency_s.shape[-1] == 1:
            return np.zeros(1)
        round_trip_s, tcp = 2 * links.latency_s.max(-1, keepdims=True), self.overheads.tcp
        rates = links.bandwidth_bits_per_s
        # at most the transfer time of the payload: a payload that does not fill the link builds no queue
        filling_s = np.minimum(round_trip_s, 8 * parcel.sent_bytes / rates).max(-1, keepdims=True)
        overhead_s: Floats = self.overheads.queue_trips * filling_s
        overhead_s = overhead_s + self.overheads.average_s_per_value * parcel.numel
        if tcp is not None:
            overhead_s = overhead_s + tcp.start_s(parcel.sent_bytes, rates, round_trip_s).max(-1, keepdims=True)
        return overhead_s

    def computed_s(self, steps: int) -> Floats:
        """Return the compute time of the first 0, 1, ..., ``steps`` steps of each replica, ``(steps + 1, M)``."""
        times_s, cycle = self.step_time_s, self.dynamic_of
        if cycle is None:
            computed_s: Floats = np.arange(steps + 1)[:, None] * times_s
            return computed_s
        speeds = {replica: 1 / float(time_s) for replica, time_s in enumerate(times_s)}
        numbers = [steps_to_train(replica, speeds, cycle) for replica in speeds]
        trained = [[trains_at(step % cycle, number, cycle) for number in numbers] for step in range(steps)]
        return np.concatenate([np.zeros((1, len(times_s))), np.cumsum(np.array(trained) * times_s, axis=0)])
