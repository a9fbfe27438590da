"""What `diloco plan` does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diloco.cli.plan_files import write_config
from diloco.cli.sites import each, make_conditions, make_links, make_workload
from diloco.cli.tables import columns
from diloco.config.configuration import Configuration
from diloco.config.keys import build
from diloco.config.presets import preset_values
from diloco.errors import ConfigurationError
from diloco.model.presets import get_preset
from diloco.simulate.overheads import CAREFULLY, IDEAL, accuracy
from diloco.simulate.planner import Candidate, Plan, Site, candidates, clipped_bytes, plan, predict
from diloco.train.resolve import resolve
from diloco.transport.links import Link
from diloco.units import format_bytes, format_count, format_duration, format_rate, parse_duration_s, parse_share

if TYPE_CHECKING:
    from diloco.cli.plan import Options

__all__ = ["run"]

STEPS_BY_NUMBERS = 10_000


def run(options: Options) -> int:
    """Plan and print; returns 1 if nothing reaches the target."""
    target = parse_share(options.target_utilization, "--target-utilization")
    _check(options, target)
    site, measured = _site(options)
    made = plan(site, target, candidates(site))
    steps = options.steps or (_preset(options).train.steps if options.preset else STEPS_BY_NUMBERS)
    record = _record(made, site, steps, options)
    if options.json:
        print(json.dumps(record | {"measured": measured}, indent=2))
    else:
        _print(made, site, record, measured)
    if options.config is not None and made.choice is not None:
        assert options.preset is not None
        write_config(options.config, options.preset, made.choice, site, steps)
        if not options.json:
            print(f"\nwritten: {options.config}   diloco train {options.config}")
    return 0 if made.choice else 1


def _check(options: Options, target: float) -> None:
    """What can be refused before anything is measured."""
    if not 0 < target < 1:
        raise ConfigurationError(
            f"--target-utilization {options.target_utilization} was given; above 0 and below 100 % would work. "
            "Nothing was planned."
        )
    if options.config is not None and options.preset is None:
        raise ConfigurationError(
            "--config was given with a model by numbers, of which no run can be made; --preset NAME would work. "
            "Nothing was planned."
        )
    if options.config is not None and not options.config.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--config {options.config} was given, and there is no folder {options.config.absolute().parent}; "
            "one that is there would work. Nothing was planned."
        )
    if options.measure and options.preset is None and not options.step_time:
        raise ConfigurationError(
            "--measure was given with a model by numbers, which can't be run; --preset NAME, or --step-time, would "
            "work. Nothing was planned."
        )
    if options.steps is not None and options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps} was given; at least 1 is needed. Nothing was planned.")
    if min(options.price_per_hour or 0.0, options.price_per_gb) < 0:
        raise ConfigurationError(
            f"--price-per-hour {options.price_per_hour} and --price-per-gb {options.price_per_gb} were given; 0 or "
            "more would work. Nothing was planned."
        )
    without_step = not options.step_time and not options.measure
    without_link = not options.bandwidth and not (options.measure and options.peers)
    if without_step or without_link:
        lacking = "how long an inner step takes" if without_step else "what the links carry"
        works = (
            "--step-time 0.8s, or --measure" if without_step else "--bandwidth 500Mbit, or --measure --peers HOST:PORT"
        )
        raise ConfigurationError(f"{lacking} is not known; {works} would work. Nothing was planned.")


def _preset(options: Options) -> Configuration:
    """The preset's settings, resolved, with its vocabulary."""
    assert options.preset is not None
    values = preset_values(options.preset) | {"transport.replicas": options.replicas}
    configuration = build(Configuration, values)
    model = dataclasses.replace(configuration.model, vocab_size=get_preset(options.preset).vocab_size)
    return resolve(dataclasses.replace(configuration, model=model), num_layers=model.layers)


def _site(options: Options) -> tuple[Site, dict[str, Any]]:
    """Where the run takes place, and what was measured of it."""
    measured: dict[str, Any] = {}
    on_cpu = options.measure or not options.device.startswith("cuda")
    conditions = make_conditions(options.transport, options.congestion_control, options.loss, on_cpu=on_cpu)
    if options.step_time:
        times = [parse_duration_s(text, "--step-time") for text in options.step_time]
    else:
        from diloco.devices import choose_device
        from diloco.simulate.measure import measure_step

        settings = _preset(options)
        device = choose_device(options.device)
        step = measure_step(settings, device)
        measured["step"] = dataclasses.asdict(step)
        times = [step.median_s]
        conditions = dataclasses.replace(
            conditions, send_s_per_value=step.send_s_per_value, merge_s_per_value=step.merge_s_per_value
        )
    times = each(times, options.replicas, "--step-time")
    if options.bandwidth:
        links = make_links(options.bandwidth, options.latency or ("0ms",), options.replicas)
    else:
        from diloco.simulate.measure import measure_links

        found = measure_links(options.peers, num_bytes=10_000_000, timeout_s=10.0)
        measured["links"] = {peer: dataclasses.asdict(link) for peer, link in zip(options.peers, found, strict=True)}
        slowest = Link(min(link.bandwidth_bits_per_s for link in found), max(link.latency_s for link in found))
        links = [slowest] * options.replicas
    workload = make_workload(options.preset, options.parameters, options.layers, max(times))
    return Site(workload=workload, links=tuple(links), step_time_s=tuple(times), conditions=conditions), measured


def _record(made: Plan, site: Site, steps: int, options: Options) -> dict[str, Any]:
    return {
        "target": made.target,
        "reached": made.choice is not None,
        "choice": _predicted(made.choice, site, steps, options) if made.choice else None,
        "nearest": _predicted(made.nearest, site, steps, options),
        "bandwidth_needed_bits_per_s": made.bandwidth_needed_bits_per_s,
        "others": [_settings(candidate) | {"why_not": why} for candidate, why in made.others],
        "searched": made.searched,
        "accuracy": accuracy(options.transport),
        "left_out": _left_out(made, site),
    }


def _left_out(made: Plan, site: Site) -> list[str]:
    """Settings of a run that would make these figures others, a sentence each."""
    words = []
    if not site.conditions.send_s_per_value:
        words.append(
            "The work of sends and merges is not counted: on a GPU it was not measured. --measure times it there."
        )
    if len(set(site.step_time_s)) > 1:
        words.append(
            "Every replica takes every step, and the fast ones wait for the slow ones; with --swarm.dynamic-steps slow "
            "ones leave out steps and nobody waits (`diloco simulate --dynamic-steps` says how many)."
        )
    chosen = made.choice or made.nearest
    more = clipped_bytes(site, chosen) / max(1.0, chosen.sent_bytes_per_step)
    if more > 1:
        words.append(
            f"Nothing is clipped; with outer.max_norm or outer.median_norm_factor every payload goes to everybody, and "
            f"{more:.1f} times the bytes are sent."
        )
    return words


def _settings(candidate: Candidate) -> dict[str, Any]:
    return {
        "algorithm": candidate.algorithm,
        "inner_steps": candidate.inner_steps,
        "num_fragments": candidate.num_fragments,
        "overlap_steps": candidate.overlap_steps,
        "codec": candidate.codec,
        "compute_utilization": candidate.compute_utilization,
        "sure_utilization": candidate.sure_utilization,
        "loss_cost": candidate.loss_cost,
    }


def _predicted(candidate: Candidate, site: Site, steps: int, options: Options) -> dict[str, Any]:
    hours = steps * candidate.step_s / 3600
    sent = steps * candidate.sent_bytes_per_step
    replicas = len(site.links)
    price = options.price_per_hour
    money = None if price is None else replicas * (hours * price + sent / 1e9 * options.price_per_gb)
    return _settings(candidate) | {
        "ideal_compute_utilization": predict(site, candidate, IDEAL),
        "steps": steps,
        "hours": hours,
        "sent_bytes_per_replica": sent,
        "cost": money,
        "loss_cost_parts": [dataclasses.asdict(part) for part in candidate.cost_parts],
    }


def _print(made: Plan, site: Site, record: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    rates = sorted({link.bandwidth_bits_per_s for link in site.links})
    latencies = sorted({link.latency_s for link in site.links})
    times = sorted(set(site.step_time_s))
    facts = {
        "model": f"{format_count(site.workload.parameters)} parameters, {site.workload.layers} layers",
        "replicas": f"{len(site.links)}, steps of {', '.join(map(format_duration, times))}",
        "links": (
            f"{', '.join(map(format_rate, rates))}, {', '.join(map(format_duration, latencies))} one way, "
            f"{100 * site.conditions.loss:.3g}% of the packets lost, {site.conditions.congestion_control}, over "
            f"{site.conditions.wire}"
        ),
        "target": f"{made.target:.4g} of the time computing; {made.searched} settings looked at",
    }
    _facts(facts | _measured_in_words(measured))
    for sentence in record["left_out"]:
        print(f"note: {sentence}")
    if record["left_out"]:
        print()
    if made.choice is None:
        print(_nothing(made))
        return
    chosen = record["choice"]
    print("the choice")
    _facts(
        {
            "algorithm": made.choice.algorithm,
            "settings": _in_words(made.choice),
            "utilisation": (
                f"{chosen['compute_utilization']:.1%}, and {chosen['sure_utilization']:.1%} {CAREFULLY}; "
                f"{chosen['ideal_compute_utilization']:.1%} if payload got all of the link"
            ),
            "accuracy": record["accuracy"],
            "work": (
                f"sends {1e9 * site.conditions.send_s_per_value:.2g} ns, merges "
                f"{1e9 * site.conditions.merge_s_per_value:.2g} ns per value"
            ),
            "run": f"{chosen['steps']:,} steps in {format_duration(3600 * chosen['hours'])}",
            "sent": f"{format_bytes(chosen['sent_bytes_per_replica'])} per replica",
        }
        | ({"cost": f"{chosen['cost']:,.2f}"} if chosen["cost"] is not None else {})
        | {"loss": f"+{made.choice.loss_cost:.2%} over data-parallel, of it:"}
    )
    for part in made.choice.cost_parts:
        print(f"    +{part.cost:.2%}  {part.what}  ({part.source})")
    print("\nwhy not")
    rows = [
        [f"{c.algorithm} {_in_words(c)}", f"{c.sure_utilization:.1%}", f"+{c.loss_cost:.2%}", why]
        for c, why in made.others
    ]
    print(columns(["settings", "at least", "loss", ""], rows))


def _measured_in_words(measured: Mapping[str, Any]) -> dict[str, str]:
    facts = {}
    if step := measured.get("step"):
        facts["measured"] = (
            f"steps of {format_duration(step['median_s'])} on {step['device']} ({step['steps']} timed, the longest "
            f"{step['spread']:.2f} times the shortest); sends {1e9 * step['send_s_per_value']:.2g} ns, merges "
            f"{1e9 * step['merge_s_per_value']:.2g} ns per value"
        )
    for peer, link in measured.get("links", {}).items():
        latency = format_duration(link["latency_s"])
        facts[f"to {peer}"] = f"{format_rate(link['bandwidth_bits_per_s'])}, {latency} one way"
    return facts


def _in_words(candidate: Candidate) -> str:
    words = f"H = {candidate.inner_steps}, P = {candidate.num_fragments}, tau = {candidate.overlap_steps}, "
    return f"{words}{candidate.codec}"


def _nothing(made: Plan) -> str:
    best = made.nearest
    needed = made.bandwidth_needed_bits_per_s
    would = (
        f"{format_rate(needed)} each way would reach it with these settings"
        if needed
        else "no bandwidth reaches it with them: latency or the work at each merge stands in the way; "
        "longer inner steps (larger batches) would help"
    )
    return (
        f"Nothing reaches {made.target:.1%}. Nearest: {best.algorithm} {_in_words(best)}, with "
        f"{best.sure_utilization:.1%} {CAREFULLY} and +{best.loss_cost:.2%} loss.\n"
        f"{would[0].upper()}{would[1:]}. So would a target of {100 * best.sure_utilization - 0.05:.1f}%, or steps that "
        "take longer."
    )


def _facts(facts: Mapping[str, str]) -> None:
    width = max(map(len, facts))
    for name, words in facts.items():
        print(f"  {name:{width}}  {words}")
    print()
