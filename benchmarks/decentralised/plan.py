"""Cases and settings as data. The rivals' workers import this module, so it must not import ``diloco``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.wan.plan import Link, Method

__all__ = ["CASES", "SETTINGS", "Case", "Job", "Setting"]


@dataclass(frozen=True)
class Setting:
    """The number of the peers, and their links.

    Attributes:
        name: its name on the command line and in the tables.
        peers: the number of peers; in the cases "view" and "joiner" the last one joins and leaves.
        link: the link of each peer; None: this machine's loopback interface.
    """

    name: str
    peers: int
    link: Link | None = None


def _wan(peers: int) -> Setting:
    name = f"100 Mbit/s, 100 ms, {peers} peers"
    return Setting(name, peers, Link(name, peers, 100e6, 0.1))


SETTINGS = (
    Setting("loopback, 2 peers", 2),
    Setting("loopback, 4 peers", 4),
    _wan(2),
    _wan(4),
    Setting("loopback, 2 peers and a joiner", 3),
    Setting("100 Mbit/s, 100 ms, 2 peers and a joiner", 3, Link("joiner", 3, 100e6, 0.1)),
)


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        kind: "round": averaging; "view": agreeing on a new view; "joiner": a replica that joins while others train.
        method: the module in ``benchmarks.decentralised.methods``, and its options.
        settings: the names of the settings in which it is measured.
    """

    kind: str
    method: Method
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"{self.kind}: {self.method.name}"


_ROUNDS = tuple(setting.name for setting in SETTINGS[:4])
_FOUR_PEERS = (SETTINGS[1].name, SETTINGS[3].name)
_JOINERS = tuple(setting.name for setting in SETTINGS[4:])


def _ours(codec: str) -> Case:
    return Case("round", Method(f"ours {codec}", "ours", {"codec": codec}), _ROUNDS)


def _hivemind(name: str, compression: str, value_bytes: int) -> Case:
    options = {"compression": compression, "bytes_per_value": value_bytes}
    return Case("round", Method(f"Hivemind {name}", "hivemind", options, rival=True), _ROUNDS)


def _gloo(dtype: str, value_bytes: int) -> Case:
    options = {"dtype": dtype, "bytes_per_value": value_bytes}
    return Case("round", Method(f"gloo {dtype}", "gloo", options), _ROUNDS)


CASES = (
    _ours("float16"),
    _ours("int8"),
    _ours("fp4"),
    Case("round", Method("ours int8, means int8", "ours", {"codec": "int8", "mean_codec": "int8"}), _FOUR_PEERS),
    _hivemind("float16", "Float16Compression", 2),
    _hivemind("8 bits (uniform)", "Uniform8BitQuantization", 1),
    _gloo("float32", 4),
    _gloo("float16", 2),
    Case("view", Method("come, leave, be killed", "views", {"times": 2}), _FOUR_PEERS),
    Case("joiner", Method("no limit", "joiner", {"state_bytes_per_s": None}), _JOINERS),
    Case("joiner", Method("4 MB/s from each", "joiner", {"state_bytes_per_s": 4e6}), _JOINERS),
)


@dataclass(frozen=True)
class Job:
    """All settings of a worker, which receives them as JSON.

    Attributes:
        method: the method to run.
        num_replicas: the number of workers.
        addresses: the IPv4 address of each worker.
        folder: the folder for keys.
        timeout_s: the time-out of everything.
        values: the float32 values in a round; in the case "joiner", about the number of parameters.
        rounds: the number of measured rounds, after one to warm up.
        wan: whether each peer has its own network interface, whose bytes can be counted.
    """

    method: Method
    num_replicas: int
    addresses: tuple[str, ...]
    folder: str
    timeout_s: float
    values: int = 25_174_016
    rounds: int = 3
    wan: bool = False

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Job:
        """Invert `to_record` after a round trip through JSON."""
        return cls(**{**record, "method": Method(**record["method"]), "addresses": tuple(record["addresses"])})
