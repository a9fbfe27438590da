"""The work of `diloco simulate` for a preset, or for a model given by --parameters and --layers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco.algorithm import MeanEncoding, Uplink, make_codec
from diloco.cli.sites import per_replica
from diloco.cli.tables import columns, facts_table
from diloco.errors import ConfigurationError
from diloco.simulate import (
    IDEAL,
    METHODS,
    Cluster,
    Method,
    Needed,
    Overheads,
    Release,
    Simulated,
    Traffic,
    Workload,
    accuracy,
    bandwidth_needed,
    check_picture_path,
    draw_timeline,
    draw_utilization,
    method_named,
    peak_bytes_per_s,
    simulate,
    timeline,
    utilization_curve,
)
from diloco.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    parse_duration_s,
    parse_rate_bits_per_s,
    parse_share,
)

if TYPE_CHECKING:
    from diloco.cli.simulate import SimulateOptions

__all__ = ["run"]

CYCLES = 3  # simulated cycles of H steps before the one whose figures are reported for a link


def run(options: SimulateOptions) -> int:
    """Print and draw what the options ask for."""
    methods = [method_named(name) for name in options.method] or list(METHODS)
    targets = [parse_share(word, "--targets") for word in options.targets.split(",") if word.strip()]
    if not targets or not all(0 < target <= 1 for target in targets):
        raise ConfigurationError(
            f"--targets must be a list of percentages above 0 and up to 100, such as 50,80,95, got {options.targets!r}."
        )
    if options.overlap_steps is not None and not any(method.overlap_steps for method in methods):
        raise ConfigurationError(
            f"--overlap-steps {options.overlap_steps} has no effect on {', '.join(each.name for each in methods)}. Use "
            "--method streaming-overlap or streaming-overlap-fp4."
        )
    if options.fragments is not None and not any(method.streaming for method in methods):
        raise ConfigurationError(
            f"--fragments {options.fragments} has no effect on {', '.join(each.name for each in methods)}. Use a "
            "streaming method."
        )
    if options.seed and not options.jitter:
        raise ConfigurationError(f"--seed {options.seed} has no effect without --jitter, such as --jitter 0.2.")
    usual, real = type(options)(), ("loss", "congestion_control", "transport", "device")
    unused = [name for name in real if getattr(options, name) != getattr(usual, name)]
    if options.assume == "paper" and unused:
        flags = " and --".join(unused).replace("_", "-")
        raise ConfigurationError(f"--{flags} has no effect on what the paper assumes. Add --assume trainer.")
    for path in (options.plot, options.timeline):
        if path is not None:
            check_picture_path(path)
    if options.timeline and not (options.bandwidth and len(methods) == 1):
        raise ConfigurationError(
            f"--timeline {options.timeline} needs --bandwidth and exactly one --method, such as --method "
            f"streaming-overlap --bandwidth 500Mbit; got {len(methods)} methods and "
            f"{'--bandwidth ' + ' '.join(options.bandwidth) if options.bandwidth else 'no --bandwidth'}."
        )
    cluster = _cluster(options)
    workload = options.workload(float(cluster.step_time_s.mean()))
    traffics = {method: _traffic(options, method, workload) for method in methods}
    clusters = {method: _for_method(options, method, cluster) for method in methods}
    facts = _facts(options, workload, cluster) | _schedule(options, workload, methods)
    if options.bandwidth:
        uplinks = _uplinks(options)
        on_link = {method: _traffic(options, method, workload, uplinks) for method in methods}
        records = [_on_link(method, on_link[method], clusters[method], options.timeline) for method in methods]
        _print_on_link(records, facts, options)
    else:
        found = {method: bandwidth_needed(traffics[method], clusters[method], targets) for method in methods}
        _print_needed(found, facts, options)
    if options.plot:
        _plot(traffics, clusters, targets, f"{facts['model']}, {facts['run']}", options.plot)
    for path in (options.plot, options.timeline):
        if path is not None and not options.json:
            print(f"\ndrawn: {path}")
    return 0


def _cluster(options: SimulateOptions) -> Cluster:
    return Cluster.of(
        options.links(unless_given="1Tbit", half_duplex=options.half_duplex),
        per_replica(
            [parse_duration_s(text, "--step-time") for text in options.step_time], options.replicas, "--step-time"
        ),
        jitter=options.jitter,
        seed=options.seed,
        overheads=_overheads(options),
    )


def _overheads(options: SimulateOptions) -> Overheads:
    if options.assume == "paper":
        return IDEAL
    return options.conditions(on_cpu=options.device == "cpu").overheads(options.replicas - 1)


def _uplinks(options: SimulateOptions) -> list[Uplink]:
    """Return what replicas know about their uplinks; empty: nothing."""
    known = options.assume == "paper" or options.conditions(on_cpu=False).measures_uplinks
    return [link.uplink for link in options.links()] if known else []


def _traffic(options: SimulateOptions, method: Method, workload: Workload, uplinks: Sequence[Uplink] = ()) -> Traffic:
    codec = make_codec(options.codec or method.codec)
    release: Release = "layer" if options.assume == "paper" else "step"
    if method.data_parallel:
        return workload.gradients(codec, options.replicas)
    schedule = method.schedule(
        workload, options.inner_steps, num_fragments=options.fragments, overlap_steps=options.overlap_steps
    )
    mean = MeanEncoding.of(options.mean_codec)
    return workload.traffic(
        schedule,
        [codec],
        options.replicas,
        release=release,
        clipping=options.clipping,
        mean=mean,
        uplinks=uplinks,
    )


def _for_method(options: SimulateOptions, method: Method, cluster: Cluster) -> Cluster:
    """Return ``cluster`` with the dynamic steps of the options. Data-parallel training has none."""
    if method.data_parallel:
        return cluster
    dynamic_of = options.inner_steps if options.dynamic_steps else None
    return dataclasses.replace(cluster, dynamic_of=dynamic_of)


def _unequal(options: SimulateOptions, cluster: Cluster) -> dict[str, str]:
    """Return the line about slow replicas, if some replicas are slower than others."""
    if len(set(cluster.step_time_s.tolist())) == 1:
        return {}
    if not options.dynamic_steps:
        return {"slow replicas": "take every step while the others wait (--dynamic-steps: they skip steps instead)"}
    steps = dataclasses.replace(cluster, dynamic_of=options.inner_steps).trained_steps
    share = sum(steps) / len(steps) / options.inner_steps
    return {
        "slow replicas": f"train {', '.join(map(str, steps))} of {options.inner_steps} steps (data-parallel: all), "
        f"{share:.0%} of all sequences; the effect on the loss is not simulated"
    }


def _facts(options: SimulateOptions, workload: Workload, cluster: Cluster) -> dict[str, str]:
    assumed = {
        "paper": "as in the paper: nothing costs time except payload, and layers are sent during the backward pass "
        "(--assume trainer predicts `diloco train`)",
        "trainer": f"overheads as measured in runs of `diloco train`: {accuracy(options.transport)}",
    }
    return {
        "model": f"{format_count(workload.parameters)} parameters, {workload.layers} layers",
        "run": f"{options.replicas} replicas, H = {options.inner_steps}, steps of {', '.join(options.step_time)}",
        "assumed": assumed[options.assume],
        **_unequal(options, cluster),
        **_means(options),
        **({"clipping": "every payload goes to every replica, except gradients"} if options.clipping else {}),
    }


def _schedule(options: SimulateOptions, workload: Workload, methods: Sequence[Method]) -> dict[str, str]:
    """Return the line about P and tau, which a small H limits, if a method has fragments."""
    for method in (each for each in reversed(methods) if each.streaming):  # the last one overlaps, if any does
        schedule = method.schedule(
            workload, options.inner_steps, num_fragments=options.fragments, overlap_steps=options.overlap_steps
        )
        overlap = f", tau = {schedule.overlap_steps} with overlap" if method.overlap_steps else ""
        return {"streaming": f"P = {schedule.num_fragments}{overlap}"}
    return {}


def _means(options: SimulateOptions) -> dict[str, str]:
    """Return the line about the encoding of means, if any mean is encoded."""
    mean = MeanEncoding.of(options.mean_codec)
    if mean.codec.exact or options.replicas < mean.least_replicas:
        return {}
    where = " where contributions take less than 16 bits per value" if options.mean_codec == "auto" else ""
    return {"means": f"encoded as {mean.codec.name}{where}"}


def _on_link(method: Method, traffic: Traffic, cluster: Cluster, picture: Path | None) -> dict[str, Any]:
    """Simulate the steady state of one method on the given links, and draw its timeline if asked for."""
    period = traffic.schedule.inner_steps
    steps = (CYCLES + 1) * period
    result = simulate(traffic, cluster, steps=steps, measure_from=CYCLES * period, history=True)
    if picture is not None:
        title = f"{method.name}: {float(result.compute_utilization):.1%} compute utilisation"
        draw_timeline(timeline(result, cluster, steps), picture, title=title)
    share = sum(cluster.trained_steps) / cluster.num_replicas / (cluster.dynamic_of or 1)
    return {"method": method.name, **_numbers(result, cluster), "trained_share": share}


def _numbers(result: Simulated, cluster: Cluster) -> dict[str, Any]:
    return {
        "compute_utilization": float(result.compute_utilization),
        "stall_per_round_s": float(result.stall_per_round_s),
        "longest_stall_s": float(result.longest_wait_s.max()),
        "rounds": result.rounds,
        "inner_steps": result.steps,
        "wall_s": float(result.wall_s),
        "sent_bytes_per_replica": float(result.sent_bytes.max()),
        "mean_bytes_per_s": float(result.sent_bytes_per_s),
        "peak_bytes_per_s": float(np.max(peak_bytes_per_s(result, float(np.mean(cluster.step_time_s))))),
    }


def _print_on_link(records: Sequence[dict[str, Any]], facts: dict[str, str], options: SimulateOptions) -> None:
    if options.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
        return
    link = f"{', '.join(format_rate(parse_rate_bits_per_s(text, '')) for text in options.bandwidth)}"
    print(facts_table(facts | {"link": f"{link}, {', '.join(options.latency)} one way"}, indent=""), end="\n\n")
    rows = [
        [
            record["method"],
            f"{record['compute_utilization']:.1%}",
            format_duration(record["stall_per_round_s"]),
            format_duration(record["longest_stall_s"]),
            format_duration(record["wall_s"] * options.inner_steps / record["inner_steps"]),
            format_bytes(record["sent_bytes_per_replica"] * options.inner_steps / record["inner_steps"]),
            format_rate(8 * record["mean_bytes_per_s"]),
            format_rate(8 * record["peak_bytes_per_s"]),
        ]
        for record in records
    ]
    timed = ["stall per round", "longest", "time per H steps"]
    print(columns(["method", "utilisation", *timed, "sent", "mean rate", "peak rate"], rows))


def _print_needed(found: dict[Method, tuple[Needed, ...]], facts: dict[str, str], options: SimulateOptions) -> None:
    if options.json:
        records = [
            {
                **({"method": method.name} if len(found) > 1 else {}),
                "target": round(100 * needed.target, 10),
                "bandwidth_gbit_per_s": needed.bandwidth_bits_per_s and needed.bandwidth_bits_per_s / 1e9,
                "compute_utilization": needed.compute_utilization,
            }
            for method, all_needed in found.items()
            for needed in all_needed
        ]
        print(json.dumps(records, indent=2))
        return
    print(facts_table(facts | {"latency": f"{', '.join(options.latency)} one way"}, indent=""), end="\n\n")
    first = next(iter(found.values()))
    header = ["bandwidth for", *(f"{100 * needed.target:g} %" for needed in first)]
    rows = [
        [
            method.name,
            *(
                format_rate(needed.bandwidth_bits_per_s)
                if needed.bandwidth_bits_per_s
                else f"none ({needed.compute_utilization:.1%} at most)"
                for needed in all_needed
            ),
        ]
        for method, all_needed in found.items()
    ]
    print(columns(header, rows))


def _plot(
    traffics: dict[Method, Traffic], clusters: dict[Method, Cluster], targets: Sequence[float], title: str, path: Path
) -> None:
    """Plot the curves from the bandwidth at which replicas hardly compute to the one at which they always do."""
    grid = np.logspace(4, 15, 441)
    curves = {
        method.name: utilization_curve(traffic, clusters[method], [float(rate) for rate in grid])
        for method, traffic in traffics.items()
    }
    low = min(int(np.argmax(curve > 0.02)) for curve in curves.values())
    high = max(int(np.argmax(curve >= min(0.995, float(curve[-1]) - 0.002))) for curve in curves.values())
    shown = slice(max(0, low - 1), high + 2)
    draw_utilization(
        {name: (grid[shown] / 1e9, curve[shown]) for name, curve in curves.items()}, path, title=title, targets=targets
    )
