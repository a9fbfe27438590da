"""Models and links as `diloco simulate` and `diloco plan` take them on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diloco.errors import ConfigurationError
from diloco.model.presets import get_preset
from diloco.simulate.overheads import Conditions, CongestionControl, Wire
from diloco.simulate.workload import Workload
from diloco.transport.links import Link
from diloco.units import parse_count, parse_duration_s, parse_rate_bits_per_s, parse_share

__all__ = ["each", "make_conditions", "make_links", "make_workload"]


def each(values: Sequence[float], replicas: int, name: str) -> list[float]:
    """One value for each replica, from one for all or one for each.

    >>> each([80.0], 3, "--latency")
    [80.0, 80.0, 80.0]
    """
    if replicas < 1:
        raise ConfigurationError(f"--replicas {replicas} must be at least 1. Nothing was computed.")
    if len(values) not in (1, replicas):
        raise ConfigurationError(
            f"{name} has {len(values)} values for {replicas} replicas; give one, or {replicas}. Nothing was computed."
        )
    return list(values) * replicas if len(values) == 1 else list(values)


def make_links(
    bandwidth: Sequence[str], latency: Sequence[str], replicas: int, half_duplex: bool = False
) -> list[Link]:
    """The link of every replica."""
    rates = each([parse_rate_bits_per_s(text, "--bandwidth") for text in bandwidth], replicas, "--bandwidth")
    latencies = each([parse_duration_s(text, "--latency") for text in latency], replicas, "--latency")
    return [Link(rate, latency_s, half_duplex) for rate, latency_s in zip(rates, latencies, strict=True)]


def make_conditions(wire: Wire, congestion_control: CongestionControl, loss: str, *, on_cpu: bool = True) -> Conditions:
    """How replicas exchange their contributions, with the work of it as measured on a CPU, or none."""
    conditions = Conditions(wire=wire, congestion_control=congestion_control, loss=parse_share(loss, "--loss"))
    conditions.overheads(1)  # refuses a loss that is out of range
    if on_cpu:
        return conditions
    return replace(conditions, average_s_per_value=0.0, send_s_per_value=0.0, merge_s_per_value=0.0)


def make_workload(preset: str | None, parameters: str | None, layers: int | None, step_time_s: float) -> Workload:
    """A preset's model, or one by numbers.

    Raises:
        ConfigurationError: unless it is one of the two.
    """
    if preset and not parameters and layers is None:
        found = get_preset(preset)
        return Workload.of_model(found.model, found.vocab_size, step_time_s)
    if parameters and layers is not None and not preset:
        return Workload(parameters=parse_count(parameters, "--parameters"), layers=layers, step_time_s=step_time_s)
    raise ConfigurationError(
        "a model is needed: give either --preset NAME (see `diloco presets`) or --parameters 1e9 --layers 24. Nothing "
        "was computed."
    )
