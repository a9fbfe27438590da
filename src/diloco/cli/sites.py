"""The options about the model and the links that `diloco simulate` and `diloco plan` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError
from diloco.units import parse_count, parse_duration_s, parse_rate_bits_per_s, parse_share

if TYPE_CHECKING:
    from diloco.simulate import Conditions, Workload
    from diloco.transport import Link

__all__ = ["SiteOptions", "per_replica"]


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """The options about a model, its replicas, and the links between them."""

    preset: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Name of a model preset; see `diloco presets`."""
    parameters: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """Instead of a preset, with --layers: number of parameters, such as 1e9 or 1.1B."""
    layers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """With --parameters: number of layers, which have equal sizes and hold all parameters."""
    replicas: int = 2
    """Number of replicas (M)."""
    bandwidth: Annotated[tuple[str, ...], arg(metavar="TEXT...", help_behavior_hint="")] = ()
    """Bandwidth in each direction, such as 500Mbit; one value for all replicas, or one for each."""
    latency: Annotated[tuple[str, ...], arg(metavar="TEXT...")] = ("0ms",)
    """One-way latency, such as 80ms; one value for all replicas, or one for each."""
    mean_codec: Literal["auto", "float32", "bfloat16", "int8", "fp4"] = "auto"
    """Codec of means, where each replica sums a part of the values (sync.arguments.average.codec)."""
    transport: Literal["torch", "hivemind"] = "torch"
    """Transport of the payloads."""
    congestion_control: Literal["bbr", "cubic", "reno"] = "cubic"
    """TCP congestion control of the senders; see `sysctl net.ipv4.tcp_congestion_control`."""
    loss: str = "0%"
    """Packet loss of the links, in per cent."""

    def workload(self, step_time_s: float) -> Workload:
        """Return the workload of the preset, or of --parameters and --layers.

        Raises:
            ConfigurationError: unless exactly one of the two is given.
        """
        from diloco.model import get_preset
        from diloco.simulate import Workload

        if self.preset and not self.parameters and self.layers is None:
            found = get_preset(self.preset)
            return Workload.of_model(found.model, found.vocab_size, step_time_s)
        if self.parameters and self.layers is not None and not self.preset:
            parameters = parse_count(self.parameters, "--parameters")
            return Workload(parameters=parameters, layers=self.layers, step_time_s=step_time_s)
        raise ConfigurationError(
            "a model is required: give either --preset NAME (see `diloco presets`) or --parameters 1e9 --layers 24."
        )

    def links(self, *, unless_given: str = "", half_duplex: bool = False) -> list[Link]:
        """Return the link of every replica, with the bandwidth ``unless_given`` if --bandwidth is not given."""
        from diloco.transport import Link

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
        """Return the conditions of the exchange. The work per value is as measured on a CPU, or 0 elsewhere.

        Raises:
            ConfigurationError: for a loss out of range.
        """
        from diloco.simulate import Conditions

        loss = parse_share(self.loss, "--loss")
        conditions = Conditions(wire=self.transport, congestion_control=self.congestion_control, loss=loss)
        conditions.overheads(1)  # raises for a loss out of range
        if on_cpu:
            return conditions
        return replace(conditions, average_s_per_value=0.0, send_s_per_value=0.0, merge_s_per_value=0.0)


def per_replica(values: Sequence[float], replicas: int, name: str) -> list[float]:
    """Return one value for each replica, given one value for all or one for each.

    >>> per_replica([80.0], 3, "--latency")
    [80.0, 80.0, 80.0]
    """
    if replicas < 1:
        raise ConfigurationError(f"--replicas must be at least 1, got {replicas}.")
    if len(values) not in (1, replicas):
        raise ConfigurationError(f"{name} has {len(values)} values for {replicas} replicas. Give 1 or {replicas}.")
    return list(values) * replicas if len(values) == 1 else list(values)
