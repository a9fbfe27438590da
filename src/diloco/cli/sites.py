"""Models and links as `diloco simulate` and `diloco plan` take them on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError
from diloco.units import parse_count, parse_duration_s, parse_rate_bits_per_s, parse_share

if TYPE_CHECKING:
    from diloco.simulate.overheads import Conditions
    from diloco.simulate.traffic import Workload
    from diloco.transport.links import Link

__all__ = ["SiteOptions", "per_replica"]


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """A model, replicas, and the links between them."""

    preset: Annotated[str | None, arg(help_behavior_hint="")] = None
    """A model of `diloco presets`."""
    parameters: Annotated[str | None, arg(help_behavior_hint="")] = None
    """Or a model by numbers: its parameters, 1e9 or 1.1B, all of them in ..."""
    layers: Annotated[int | None, arg(help_behavior_hint="")] = None
    """... so many layers that are alike."""
    replicas: int = 2
    """M."""
    bandwidth: Annotated[tuple[str, ...], arg(help_behavior_hint="")] = ()
    """Each way, such as 500Mbit; one for all replicas, or one for each."""
    latency: tuple[str, ...] = ("0ms",)
    """One way, such as 80ms; one for all replicas, or one for each."""
    mean_codec: Literal["auto", "float32", "bfloat16", "int8", "fp4"] = "auto"
    """What means travel as where each replica sums a part of the values (transport.mean_codec)."""
    transport: Literal["torch", "hivemind"] = "torch"
    """What carries the payloads."""
    congestion_control: Literal["bbr", "cubic", "reno"] = "cubic"
    """Of TCP on the machines that send: `sysctl net.ipv4.tcp_congestion_control` there."""
    loss: str = "0%"
    """Packets that the links lose, in per cent."""

    def workload(self, step_time_s: float) -> Workload:
        """The preset's model, or the one by numbers.

        Raises:
            ConfigurationError: unless exactly one of the two is given.
        """
        from diloco.model.presets import get_preset
        from diloco.simulate.traffic import Workload

        if self.preset and not self.parameters and self.layers is None:
            found = get_preset(self.preset)
            return Workload.of_model(found.model, found.vocab_size, step_time_s)
        if self.parameters and self.layers is not None and not self.preset:
            parameters = parse_count(self.parameters, "--parameters")
            return Workload(parameters=parameters, layers=self.layers, step_time_s=step_time_s)
        raise ConfigurationError(
            "a model is needed: give either --preset NAME (see `diloco presets`) or --parameters 1e9 --layers 24."
        )

    def links(self, *, unless_given: str = "", half_duplex: bool = False) -> list[Link]:
        """The link of every replica, of the bandwidth ``unless_given`` where no other is."""
        from diloco.transport.links import Link

        texts = self.bandwidth or (unless_given,)
        rates = per_replica(
            [parse_rate_bits_per_s(text, "--bandwidth") for text in texts], self.replicas, "--bandwidth"
        )
        latencies = [parse_duration_s(text, "--latency") for text in self.latency]
        return [
            Link(rate, latency_s, half_duplex)
            for rate, latency_s in zip(rates, per_replica(latencies, self.replicas, "--latency"), strict=True)
        ]

    def conditions(self, *, on_cpu: bool) -> Conditions:
        """How replicas exchange their contributions, with the work of it as measured on a CPU, or none."""
        from diloco.simulate.overheads import Conditions

        loss = parse_share(self.loss, "--loss")
        conditions = Conditions(wire=self.transport, congestion_control=self.congestion_control, loss=loss)
        conditions.overheads(1)  # refuses a loss that is out of range
        if on_cpu:
            return conditions
        return replace(conditions, average_s_per_value=0.0, send_s_per_value=0.0, merge_s_per_value=0.0)


def per_replica(values: Sequence[float], replicas: int, name: str) -> list[float]:
    """One value for each replica, from one for all or one for each.

    >>> per_replica([80.0], 3, "--latency")
    [80.0, 80.0, 80.0]
    """
    if replicas < 1:
        raise ConfigurationError(f"--replicas {replicas} must be at least 1.")
    if len(values) not in (1, replicas):
        raise ConfigurationError(f"{name} has {len(values)} values for {replicas} replicas; give one, or {replicas}.")
    return list(values) * replicas if len(values) == 1 else list(values)
