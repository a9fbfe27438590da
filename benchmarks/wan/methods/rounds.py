"""Only rounds, of several sizes in turn, each after a pause, to time them: those of this package."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from benchmarks.wan.connector import Connector
from benchmarks.wan.methods import base
from benchmarks.wan.plan import Job
from diloco.algorithm import Contribution, RoundId, make_codec


class Program(base.Rounds):
    """Options: ``codec``, ``mean_codec``, and those of `Connector`."""

    def __init__(self, job: Job, replica: int) -> None:
        super().__init__(job, replica)
        self._codec = make_codec(self.options["codec"])
        self._connector = Connector(job, replica)

    def prepare(self) -> Mapping[str, Any]:
        return self._connector.prepare()

    def connect(self, known: Sequence[Mapping[str, Any]]) -> None:
        self._transport = self._connector.connect(known)

    def before(self, index: int) -> None:
        self._payload = self._codec.encode(self.values[index])

    def average(self, index: int, number: int, values: Tensor) -> Tensor:
        pending = self._transport.average(
            Contribution(
                round=RoundId(index, number),
                replica=self.replica,
                codec=self._codec,
                numel=values.numel(),
                payload=self._payload,
                mean=self.options["mean_codec"],
            )
        )
        average = pending.wait()
        self.payload_bytes += average.sent_bytes
        return average.values

    def close(self) -> None:
        self._connector.close()
