"""The links, the work of a replica and the methods to compare, as data. This module does not import torch."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Link:
    """Replicas with equal links.

    Attributes:
        name: its name on the command line and in the tables.
        replicas: M.
        rate_bits_per_s: the rate of each replica, up and down.
        rtt_s: the round trip between any two replicas.
        loss_percent: the packet loss, one way.
        congestion_control: that of TCP; empty: the kernel's default.
        real_packets: whether packets have 1500 bytes where TCP would pass larger ones to the link; on a lossy link
            they always have.
        jitter_s: each packet is late by up to that much; packets keep their order.
        up_bits_per_s: the uplinks' rates, from the first replica on; those of the others don't differ.
    """

    name: str
    replicas: int
    rate_bits_per_s: float
    rtt_s: float
    loss_percent: float = 0.0
    congestion_control: str = ""
    real_packets: bool = False
    jitter_s: float = 0.0
    up_bits_per_s: tuple[float, ...] = ()

    def arguments(self) -> list[str]:
        """Return the arguments of the network script's ``up``.

        >>> Link("x", 2, 100e6, 0.1, loss_percent=1, congestion_control="cubic").arguments()
        ['2', 'rate=100mbit', 'rtt=100ms', 'loss=1%', 'cc=cubic']
        """
        arguments = [str(self.replicas), f"rate={self.rate_bits_per_s / 1e6:g}mbit", f"rtt={1e3 * self.rtt_s:g}ms"]
        arguments += [f"loss={self.loss_percent:g}%"] if self.loss_percent else []
        arguments += [f"cc={self.congestion_control}"] if self.congestion_control else []
        return arguments + (["segs=mtu"] if self.real_packets else [])

    def transfer_s(self, payload_bytes: float) -> float:
        """Return the least time that ``payload_bytes`` take from one replica to another: at the link's rate, plus the
        latency."""
        return 8 * payload_bytes / self.rate_bits_per_s + self.rtt_s / 2


LINKS = (
    Link("100 Mbit/s, 100 ms, 2 replicas", 2, 100e6, 0.1),
    Link("100 Mbit/s, 100 ms, 4 replicas", 4, 100e6, 0.1),
    Link("100 Mbit/s, 100 ms, 8 replicas", 8, 100e6, 0.1),
    Link("500 Mbit/s, 100 ms, 2 replicas", 2, 500e6, 0.1),
    Link("1 Gbit/s, 30 ms, 2 replicas", 2, 1e9, 0.03),
    Link("100 Mbit/s, 100 ms, cubic", 2, 100e6, 0.1, congestion_control="cubic"),
    Link("100 Mbit/s, 100 ms, 1 % loss, bbr", 2, 100e6, 0.1, 1, "bbr"),
    Link("100 Mbit/s, 100 ms, 10 % loss, bbr", 2, 100e6, 0.1, 10, "bbr"),
    Link("100 Mbit/s, 100 ms, 1 % loss, cubic", 2, 100e6, 0.1, 1, "cubic"),
    Link("100 Mbit/s, 100 ms, 10 % loss, cubic", 2, 100e6, 0.1, 10, "cubic"),
    Link("100 Mbit/s, 100 ms, real packets", 2, 100e6, 0.1, real_packets=True),
    Link("200 Mbit/s, 30 ms, 2 replicas", 2, 200e6, 0.03),
    Link("200 Mbit/s, 30 ms, cubic", 2, 200e6, 0.03, congestion_control="cubic"),
    Link("50 Mbit/s, 300 ms, 2 replicas", 2, 50e6, 0.3),
    Link("50 Mbit/s, 300 ms, cubic", 2, 50e6, 0.3, congestion_control="cubic"),
    Link("200 Mbit/s, 500 ms, 2 replicas", 2, 200e6, 0.5),
    Link("200 Mbit/s, 500 ms, cubic", 2, 200e6, 0.5, congestion_control="cubic"),
    Link("100 down / 20 up, 150 ms, 3 replicas", 3, 100e6, 0.15, up_bits_per_s=(20e6,) * 3),
    Link("250 down / 25 up, 40 ms, 5 replicas", 5, 250e6, 0.04, up_bits_per_s=(25e6,) * 5),
    Link(
        "satellite: 100 down / 15 up, 45 ms, 20 ms of jitter, 1 % loss, bbr, 3 replicas",
        3,
        100e6,
        0.045,
        1,
        "bbr",
        jitter_s=0.02,
        up_bits_per_s=(15e6,) * 3,
    ),
    Link(
        "satellite: 100 down / 15 up, 45 ms, 5 ms of jitter, 1 % loss, bbr, 3 replicas",
        3,
        100e6,
        0.045,
        1,
        "bbr",
        jitter_s=0.005,
        up_bits_per_s=(15e6,) * 3,
    ),
    Link("40 down / 15 up, 80 ms, 4 replicas", 4, 40e6, 0.08, up_bits_per_s=(15e6,) * 4),
    Link("40 down / 15 up, 80 ms, 4 replicas, one sends at 5", 4, 40e6, 0.08, up_bits_per_s=(5e6, 15e6, 15e6, 15e6)),
    Link("100 Mbit/s, 100 ms, 3 replicas, one sends at 20", 3, 100e6, 0.1, up_bits_per_s=(20e6,)),
    Link("100 Mbit/s, 100 ms, 8 replicas, one sends at 20", 8, 100e6, 0.1, up_bits_per_s=(20e6,)),
    Link("300 Mbit/s, 80 ms, 0.5 % loss, cubic, 3 replicas", 3, 300e6, 0.08, 0.5, "cubic"),
    Link("300 Mbit/s, 80 ms, 0.5 % loss, bbr, 3 replicas", 3, 300e6, 0.08, 0.5, "bbr"),
)

LOOPBACK = Link("loopback, 2 replicas", 2, 10e9, 0.0)
"""Not in the tables: processes of this machine, to try the benchmark without a network and without root."""

GRID = tuple(
    Link(f"{rate} Mbit/s, {rtt} ms, {replicas} replicas", replicas, 1e6 * rate, rtt / 1e3)
    for rate in (100, 200, 300, 500)
    for rtt in (100, 300, 500)
    for replicas in (2, 4, 8)
)
"""All combinations; those that `LINKS` has as well are equal there."""


@dataclass(frozen=True)
class Work:
    """The work of every replica, whatever the method.

    Attributes:
        layers, width: those of the model; a layer has ``12 * width**2 + 2 * width`` values, like a transformer's.
        inner_steps: H.
        num_fragments: P of the streaming methods.
        overlap_steps: tau of the streaming methods.
        cycles: the length of the measured part, ``cycles * inner_steps`` inner steps.
        data_parallel_steps: the length of the measured part for methods that communicate at every step.
        step_s: the length of the pause that takes the place of an accelerator's step.
    """

    layers: int = 8
    width: int = 512
    inner_steps: int = 60
    num_fragments: int = 4
    overlap_steps: int = 10
    cycles: int = 2
    data_parallel_steps: int = 3
    step_s: float = 0.25

    @property
    def values(self) -> int:
        """The number of float32 values to synchronise.

        >>> Work().values
        25174016
        """
        return self.layers * (12 * self.width**2 + 2 * self.width)


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Attributes:
        name: its name on the command line and in the tables.
        program: the module in ``benchmarks.wan.methods`` that implements it.
        options: the options of that module.
        rival: whether it runs with the rivals' interpreter.
    """

    name: str
    program: str
    options: dict[str, Any] = field(default_factory=dict)
    rival: bool = False


ROUND_VALUES = (262_144, 2_097_152, 8_388_608)
"""The numbers of values in the rounds of methods that only average."""


def _rounds(name: str, codec: str, **options: Any) -> Method:
    return Method(f"rounds {name}", "rounds", {"codec": codec, "mean_codec": "float32", **options})


METHODS = (
    Method("no communication", "nothing"),
    Method("data-parallel (torch DDP)", "data_parallel"),
    Method("DiLoCo float32", "ours", {"codec": "float32"}),
    Method("DiLoCo float16", "ours", {"codec": "float16"}),
    Method("DiLoCo fp4", "ours", {"codec": "fp4"}),
    Method("Streaming float32", "ours", {"codec": "float32", "streaming": True}),
    Method("Streaming fp4", "ours", {"codec": "fp4", "streaming": True}),
    Method("Streaming fp4, fp4 means", "ours", {"codec": "fp4", "streaming": True, "mean_codec": "fp4"}),
    Method("Streaming fp4, not compressed", "ours", {"codec": "fp4", "streaming": True, "not_compressed": True}),
    Method("Streaming fp4, swarm", "ours", {"codec": "fp4", "streaming": True, "swarm": True}),
    _rounds("fp4", "fp4"),
    _rounds("float32", "float32"),
    _rounds("fp4, swarm", "fp4", swarm=True),
    _rounds("float32, swarm", "float32", swarm=True),
    _rounds("float16, swarm", "float16", swarm=True),
    _rounds("int8, swarm", "int8", swarm=True),
    Method("rounds gloo float32", "rounds_gloo", {"dtype": "float32"}),
    Method("rounds gloo float16", "rounds_gloo", {"dtype": "float16"}),
    Method(
        "rounds hivemind float16",
        "rounds_hivemind",
        {"compression": "Float16Compression", "bytes_per_value": 2},
        rival=True,
    ),
    Method(
        "rounds hivemind 8 bits",
        "rounds_hivemind",
        {"compression": "Uniform8BitQuantization", "bytes_per_value": 1},
        rival=True,
    ),
    Method("torchft DiLoCo", "torchft", rival=True),
    Method("torchft Streaming", "torchft", {"streaming": True}, rival=True),
    Method("hivemind float32", "hivemind", {"compression": "NoCompression", "bytes_per_value": 4}, rival=True),
    Method("hivemind float16", "hivemind", {"compression": "Float16Compression", "bytes_per_value": 2}, rival=True),
)


@dataclass(frozen=True)
class Job:
    """All settings of a worker, which receives them as JSON."""

    method: Method
    work: Work
    num_replicas: int
    addresses: tuple[str, ...]
    timeout_s: float
    rate_bits_per_s: float = 0.0
    device: str = "wan0"

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Invert `to_record` after a round trip through JSON."""
        parts = {"method": Method(**record["method"]), "work": Work(**record["work"])}
        return cls(**{**record, **parts, "addresses": tuple(record["addresses"])})
