"""The work of `diloco plan`: find the settings, print them, and write a file for `diloco train`."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.checkpoint import write_whole
from diloco.cli.sites import per_replica
from diloco.cli.tables import columns, facts_table
from diloco.config import Configuration, Values, build, command_text, flatten, in_toml, preset_values, write_values
from diloco.events import json_ready
from diloco.model import get_preset
from diloco.simulate import CAREFULLY, IDEAL, Candidate, Plan, Site, accuracy, candidates, clipped_bytes, plan, predict
from diloco.train import resolve
from diloco.transport import Link, TransportSettings
from diloco.units import format_bytes, format_count, format_duration, format_rate, parse_duration_s

if TYPE_CHECKING:
    from diloco.cli.plan import PlanOptions

__all__ = ["planned_values", "run"]

STEPS_BY_NUMBERS = 10_000
TIMEOUT_MARGIN = 3  # the time-out of a round is at least this many times its predicted time


def run(options: PlanOptions, target: float) -> int:
    """Make the plan for ``target`` and print it; return 1 if no setting reaches it."""
    site, measured = _site(options)
    steps = options.steps or (_preset(options).train.steps if options.preset else STEPS_BY_NUMBERS)
    # with more inner steps than the run has, replicas would never synchronise
    made = plan(site, target, [each for each in candidates(site) if each.inner_steps <= steps])
    record = _record(made, site, steps, options)
    if options.json:
        print(json.dumps(record | {"measured": measured}, indent=2))
    else:
        print(_report(made, site, record, measured))
    if options.config is not None and made.choice is not None:
        assert options.preset is not None
        _write_config(options.config, made.choice, record["settings"], options.transport)
        if not options.json:
            print(f"\nwritten: {options.config}   {command_text('train', options.config)}")
    return 0 if made.choice else 1


def _preset(options: PlanOptions) -> Configuration:
    """Return the resolved settings of the preset, with its vocabulary size."""
    assert options.preset is not None
    return _resolved(options.preset, {"network.replicas": options.replicas}, options.steps)


def _resolved(preset: str, values: Values, steps: int | None) -> Configuration:
    configuration = build(Configuration, preset_values(preset, steps=steps) | values)
    model = dataclasses.replace(configuration.model, vocab_size=get_preset(preset).vocab_size)
    return resolve(dataclasses.replace(configuration, model=model), num_layers=model.layers)


def _site(options: PlanOptions) -> tuple[Site, dict[str, Any]]:
    """Return the site of the run, and the measurements that it is based on."""
    measured: dict[str, Any] = {}
    on_cpu = not options.step_time or not options.device.startswith("cuda")
    conditions = options.conditions(on_cpu=on_cpu)
    if options.step_time:
        times = [parse_duration_s(text, "--step-time") for text in options.step_time]
    else:
        from diloco.devices import use_device
        from diloco.simulate import measure_step

        settings = _preset(options)
        device = use_device(options.device)
        step = measure_step(settings, device)
        measured["step"] = dataclasses.asdict(step)
        times = [step.median_s]
        conditions = dataclasses.replace(
            conditions, send_s_per_value=step.send_s_per_value, merge_s_per_value=step.merge_s_per_value
        )
    times = per_replica(times, options.replicas, "--step-time")
    if options.bandwidth:
        links = options.links()
    else:
        from diloco.simulate import measure_links

        found = measure_links(options.peers)
        measured["links"] = {peer: dataclasses.asdict(link) for peer, link in zip(options.peers, found, strict=True)}
        slowest = Link(min(link.bandwidth_bits_per_s for link in found), max(link.latency_s for link in found))
        links = [slowest] * options.replicas
    return Site(
        workload=options.workload(max(times)),
        links=tuple(links),
        step_time_s=tuple(times),
        conditions=conditions,
        mean_codec=options.mean_codec,
    ), measured


def _record(made: Plan, site: Site, steps: int, options: PlanOptions) -> dict[str, Any]:
    """Return what ``--json`` prints, except for the measurements."""
    values = planned_values(options.preset, made.choice, site, steps) if made.choice and options.preset else {}
    return {
        "target": made.target,
        "reached": made.choice is not None,
        "choice": _predicted(made.choice, site, steps, options) if made.choice else None,
        "settings": json_ready(values),
        "changed": _changed(options, values),
        "nearest": _predicted(made.nearest, site, steps, options),
        "bandwidth_needed_bits_per_s": made.bandwidth_needed_bits_per_s,
        "others": [_settings(candidate) | {"why_not": why} for candidate, why in made.others],
        "searched": made.searched,
        "accuracy": accuracy(options.transport),
        "left_out": _left_out(made, site),
    }


def _changed(options: PlanOptions, values: Values) -> dict[str, list[Any]]:
    """Return the settings of a run with ``values`` that differ from the preset's: key -> its value and theirs."""
    if options.preset is None or not values:
        return {}
    before, after = (flatten(_resolved(options.preset, each, values["train.steps"])) for each in ({}, values))
    return {name: json_ready([before[name], after[name]]) for name in before if before[name] != after[name]}


def _left_out(made: Plan, site: Site) -> list[str]:
    """Return one sentence for each setting that would change these figures and is not part of the plan."""
    words = []
    if not site.conditions.send_s_per_value:
        words.append(
            "The work of sends and merges is not counted, as it was not measured on a GPU. --measure times it."
        )
    if len(set(site.step_time_s)) > 1:
        words.append(
            "Every replica takes every step, so fast replicas wait for slow ones. With --swarm.dynamic-steps slow "
            "replicas skip steps instead (`diloco simulate --dynamic-steps` shows how many)."
        )
    chosen = made.choice or made.nearest
    more = clipped_bytes(site, chosen) / max(1.0, chosen.sent_bytes_per_step)
    if more > 1:
        words.append(
            "Contributions are not clipped. With sync.arguments.average.max_norm or an sync.average other "
            f"than the mean, every payload goes to every replica, and {more:.1f} times as many bytes are sent."
        )
    return words


def _settings(candidate: Candidate) -> dict[str, Any]:
    names = ("algorithm", "inner_steps", "num_fragments", "overlap_steps", "codec")
    figures = ("compute_utilization", "sure_utilization", "sent_bytes_per_step")
    return {name: getattr(candidate, name) for name in (*names, *figures)}


def _predicted(candidate: Candidate, site: Site, steps: int, options: PlanOptions) -> dict[str, Any]:
    hours = steps * candidate.step_s / 3600
    sent = steps * candidate.sent_bytes_per_step
    prices = [options.price_per_hour or 0.0, options.price_per_gb]
    cost = len(site.links) * (hours * prices[0] + sent / 1e9 * prices[1]) if any(prices) else None
    return _settings(candidate) | {
        "ideal_compute_utilization": predict(site, candidate, IDEAL),
        "steps": steps,
        "hours": hours,
        "sent_bytes_per_replica": sent,
        "cost": cost,
    }


def _report(made: Plan, site: Site, record: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Return the plan as text."""
    blocks = [facts_table(_circumstances(made, site) | _measured_in_words(measured))]
    if record["left_out"]:
        blocks.append("\n".join(f"note: {sentence}" for sentence in record["left_out"]))
    if made.choice is None:
        return "\n\n".join([*blocks, _nothing(made)])
    chosen = record["choice"]
    facts = {
        "algorithm": made.choice.algorithm,
        "settings": _in_words(made.choice),
        "utilisation": (
            f"{chosen['compute_utilization']:.1%}, and {chosen['sure_utilization']:.1%} {CAREFULLY}; "
            f"{chosen['ideal_compute_utilization']:.1%} if payload used the whole link"
        ),
        "accuracy": record["accuracy"],
        "work": _work(site.conditions.send_s_per_value, site.conditions.merge_s_per_value),
        "run": f"{chosen['steps']:,} steps in {format_duration(3600 * chosen['hours'])}",
        "sent": f"{format_bytes(chosen['sent_bytes_per_replica'])} per replica",
        "cost": None if chosen["cost"] is None else f"{chosen['cost']:,.2f}",
    }
    known = {name: words for name, words in facts.items() if words is not None}
    blocks.append(f"chosen\n{facts_table(known)}")
    if record["settings"]:
        blocks += ["settings\n" + textwrap.indent(write_values(record["settings"]).strip(), "  ")]
        changed = {name: " -> ".join(map(in_toml, pair)) for name, pair in record["changed"].items()}
        blocks += [f"different from the preset\n{facts_table(changed)}"]
    rows = [
        [f"{c.algorithm} {_in_words(c)}", f"{c.sure_utilization:.1%}", format_bytes(int(c.sent_bytes_per_step)), why]
        for c, why in made.others
    ]
    others = columns(["settings", "at least", "sent per step", ""], rows)
    return "\n\n".join([*blocks, f"not chosen\n{others}"])


def _circumstances(made: Plan, site: Site) -> dict[str, str]:
    rates = sorted({link.bandwidth_bits_per_s for link in site.links})
    latencies = sorted({link.latency_s for link in site.links})
    return {
        "model": f"{format_count(site.workload.parameters)} parameters, {site.workload.layers} layers",
        "replicas": f"{len(site.links)}, steps of {', '.join(map(format_duration, sorted(set(site.step_time_s))))}",
        "links": (
            f"{', '.join(map(format_rate, rates))}, {', '.join(map(format_duration, latencies))} one way, "
            f"{100 * site.conditions.loss:.3g}% packet loss, {site.conditions.congestion_control}, over "
            f"{site.conditions.wire}"
        ),
        "target": f"{100 * made.target:.4g}% compute utilisation; {made.searched} settings compared",
    }


def _measured_in_words(measured: Mapping[str, Any]) -> dict[str, str]:
    facts = {}
    if step := measured.get("step"):
        facts["measured"] = (
            f"steps of {format_duration(step['median_s'])} on {step['device']} ({step['steps']} timed, the slowest "
            f"{step['spread']:.2f} times the fastest); {_work(step['send_s_per_value'], step['merge_s_per_value'])}"
        )
    for peer, link in measured.get("links", {}).items():
        latency = format_duration(link["latency_s"])
        facts[f"to {peer}"] = f"{format_rate(link['bandwidth_bits_per_s'])}, {latency} one way"
    return facts


def _work(send_s_per_value: float, merge_s_per_value: float) -> str:
    return f"{1e9 * send_s_per_value:.2g} ns per value for sends, {1e9 * merge_s_per_value:.2g} ns for merges"


def _in_words(candidate: Candidate) -> str:
    words = f"H = {candidate.inner_steps}, P = {candidate.num_fragments}, tau = {candidate.overlap_steps}, "
    return f"{words}{candidate.codec}"


def _nothing(made: Plan) -> str:
    best, needed = made.nearest, made.bandwidth_needed_bits_per_s
    would = (
        f"These settings reach it with {format_rate(needed)} in each direction"
        if needed
        else "These settings do not reach it with any bandwidth, because of the latency or the work of each merge"
    )
    return (
        f"No settings reach {made.target:.1%}. The nearest are {best.algorithm} {_in_words(best)}, with "
        f"{best.sure_utilization:.1%} {CAREFULLY}.\n"
        f"{would}. Alternatively, set --target-utilization to {100 * best.sure_utilization - 0.05:.1f}% or less, or "
        "make inner steps longer (larger batches)."
    )


def planned_values(preset: str, choice: Candidate, site: Site, steps: int) -> Values:
    """Return the keys of `diloco train` for ``choice``, in one process with the links of ``site`` emulated.

    An emulated link has the bandwidth that payload gets of the real link, so the run is as fast as predicted.
    """
    values: Values = {
        "preset": get_preset(preset).name,
        "algorithm": choice.algorithm,
        "train.steps": steps,
        "sync.codec": choice.codec,
        "network.replicas": len(site.links),
    }
    if choice.algorithm != "data-parallel":
        # a shared start exchanges gradients at every step, for which such links are too slow
        values["train.data_parallel_steps"] = 0
        values["sync.inner_steps"] = choice.inner_steps
        values["sync.arguments.average.codec"] = site.mean_codec
    if choice.algorithm == "streaming":
        values["sync.num_fragments"] = choice.num_fragments
        values["sync.overlap_steps"] = choice.overlap_steps
    if choice.longest_round_s > TransportSettings.round_timeout_s / TIMEOUT_MARGIN:
        values["network.round_timeout"] = float(math.ceil(TIMEOUT_MARGIN * choice.longest_round_s))
    goodput = site.overheads.goodput
    emulated = {
        "emulate.bandwidth": tuple(goodput * link.bandwidth_bits_per_s for link in site.links),
        "emulate.latency": tuple(link.latency_s for link in site.links),
        "emulate.step_time": site.step_time_s,
    }
    return values | {name: each[:1] if len(set(each)) == 1 else each for name, each in emulated.items()}


def _write_config(path: Path, choice: Candidate, values: Values, transport: str) -> None:
    """Write the file for `diloco train` atomically."""
    text = (
        f"# Planned: {choice.compute_utilization:.1%} compute utilisation.\n"
        "# This run takes place in one process, on a virtual clock, with emulated links. Each link has the bandwidth\n"
        "# that payload gets of the real one. To run on several machines, remove the three lines of emulation at the\n"
        f"# end of [transport] and use --transport {transport}.\n\n"
        f"{write_values(values)}"
    )
    write_whole(path, text)
