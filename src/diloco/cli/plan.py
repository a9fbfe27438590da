"""``diloco plan`` and ``diloco presets``: what settings cost on a link, which others fit it, and which there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from diloco.algorithm import SyncSettings
from diloco.config import Configuration, compose, flatten, parse_flags, parse_options, preset_values, to_toml
from diloco.errors import ConfigurationError
from diloco.events import to_json
from diloco.model import PRESETS, with_vocabulary
from diloco.transport import EmulateSettings
from diloco.units import (
    COUNT,
    PERCENTAGE,
    Duration,
    Rate,
    columns,
    facts_table,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    parse,
)

if TYPE_CHECKING:
    from diloco.plan import Site

DESCRIPTION = """Predict what the settings of `diloco train` cost on a link: compute utilisation, bytes and
waiting, for each fragment; and the same for other H and codecs, to choose from.

Takes the TOML file and the flags of `diloco train`; what does not touch the link has
no effect. Nothing is trained or sent, and the loss is not predicted.

Examples:
  diloco plan run.toml --bandwidth 100Mbit --latency 50ms --step-time 250ms
  diloco plan --preset 1b --replicas 4 --bandwidth 500Mbit --latency 80ms --step-time 0.8s
  diloco plan --parameters 7B --fragments 11 --inner-steps 200 --bandwidth 1Gbit --step-time 600ms
  diloco plan --preset tiny --replicas 2 --bandwidth 100Mbit 20Mbit --step-time 90ms --json"""

SHOWN = (
    *("preset", "algorithm", "train.steps", "train.data_parallel_steps", "train.device", "model.source"),
    *("network.transport", "network.replicas", "model.lora_rank", "sync.inner_steps", "sync.overlap_steps"),
    *("sync.num_fragments", "sync.fragment_strategy", "sync.codec", "sync.average", "sync.arguments"),
)
"""The settings of a run that the help lists."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Configuration):
    """The settings of a run, and what is known about its machines and links."""

    bandwidth: tuple[Rate, ...] = ()
    """Bandwidth in each direction, such as 500Mbit; one value for all replicas, or one for each."""
    latency: tuple[Duration, ...] = ()
    """One-way latency, such as 80ms; one value for all replicas, or one for each. Default: 0ms."""
    step_time: tuple[Duration, ...] = ()
    """Compute time of one inner step, such as 0.8s; one value for all replicas, or one for each."""
    parameters: str | None = None
    """Plan for any model of so many parameters, such as 7B, in fragments of equal size."""
    congestion_control: Literal["bbr", "cubic", "reno"] = "cubic"
    """TCP congestion control of the senders; see `sysctl net.ipv4.tcp_congestion_control`."""
    loss: str = "0%"
    """Packet loss of the links, in per cent."""
    price_per_hour: Annotated[float, Meta(ge=0)] = 0.0
    """Price of one hour of one replica, such as 3.7, in any currency."""
    price_per_gb: Annotated[float, Meta(ge=0)] = 0.0
    """Price of sending 10^9 bytes (egress), such as 0.08."""
    json: bool = False
    """Print one JSON object."""


OWN = {field.name for field in fields(PlanSettings)} - {field.name for field in fields(Configuration)}


def run_plan(arguments: Sequence[str]) -> int:
    """Print the cost of the settings, and the table of others."""
    shown = flatten(PlanSettings()) | preset_values(PlanSettings.preset)
    common = [*(name for name in shown if name in OWN), *SHOWN]
    line = parse_flags(PlanSettings, "plan", DESCRIPTION, arguments, shown=shown, common=common)
    options = PlanSettings(**{name: value for name, value in line.values.items() if name in OWN})
    asked = compose(replace(line, values={name: value for name, value in line.values.items() if name not in OWN}))
    settings, model, sizes = _model(options, asked)
    if line.print_config:
        print(to_toml(settings))
        return 0
    record = _record(options, settings, model, sizes)
    print(to_json(record, indent=2) if options.json else _report(record))
    return 0


def _model(options: PlanSettings, asked: Configuration) -> tuple[Configuration, dict[str, Any], tuple[int, ...]]:
    """Return the resolved settings, facts about the model, and the number of values in each fragment."""
    from diloco.data import corpus_vocabulary_size
    from diloco.plan import fragment_sizes
    from diloco.train import make_fragments, outline, replica_bytes, resolve

    if asked.network.elastic and asked.network.run is None:
        asked = replace(asked, network=replace(asked.network, run="plan"))  # a plan needs no name for its swarm
    emulate, asked = asked.emulate, replace(asked, emulate=EmulateSettings())  # which only some transports may have
    if options.parameters is not None:
        total, facts = round(parse(options.parameters, "--parameters", COUNT)), {}
        settings = resolve(asked)
        number = settings.sync.num_fragments or 1
        sizes = fragment_sizes(total, number, number)
    else:
        here = tuple(path for path in asked.data.paths if Path(path).expanduser().exists())
        size = asked.model.vocab_size or corpus_vocabulary_size(replace(asked.data, paths=here))
        built = outline(asked, size)
        total, facts = built.num_parameters(), {"layers": built.num_layers, "vocabulary": built.vocab_size}
        asked = replace(asked, model=with_vocabulary(asked.model, size))
        settings = resolve(asked, num_layers=built.num_layers, max_sequence_length=built.max_sequence_length)
        sizes = tuple(fragment.numel for fragment in make_fragments(settings.sync, built))
    trained = sum(sizes)
    memory_bytes = replica_bytes(settings, trained, total - trained)
    model = {"parameters": total, "trained": trained, **facts, "memory_bytes": memory_bytes}
    return replace(settings, emulate=emulate), model, sizes


def _record(
    options: PlanSettings, settings: Configuration, model: dict[str, Any], sizes: Sequence[int]
) -> dict[str, Any]:
    from diloco.plan import ACCURACY, Exchange, predict, table

    site = _site(options, settings)
    exchange = Exchange.of(settings, sizes)
    own, baseline = predict(exchange, site), predict(Exchange.of_gradients(sum(sizes)), site)
    start, steps = settings.train.data_parallel_steps, settings.train.steps
    hours = (start * baseline.step_s + (steps - start) * own.step_s) / 3600
    sent_bytes = start * baseline.mean_sent_bytes_per_step + (steps - start) * own.mean_sent_bytes_per_step
    machines, sending = options.price_per_hour * hours, options.price_per_gb * sent_bytes / 1e9
    return {
        "model": model,
        "site": asdict(site),
        "work_is_known": site.conditions.send_s_per_value > 0,
        "algorithm": settings.algorithm,
        "prediction": asdict(own),
        "data_parallel": asdict(baseline),
        "accuracy": ACCURACY,
        "round_timeout_s": settings.network.round_timeout,
        "steps": steps,
        "data_parallel_steps": start,
        "hours": hours,
        "sent_bytes_per_replica": sent_bytes,
        "cost": len(site.links) * (machines + sending),
        "cost_of_sending": len(site.links) * sending,
        "table": [asdict(row) for row in table(exchange, site, most_steps=steps - start)],
    }


def _site(options: PlanSettings, settings: Configuration) -> Site:
    from diloco.plan import Conditions, Site
    from diloco.transport import Link

    emulated, replicas = settings.emulate, settings.network.replicas
    loss = round(parse(options.loss, "--loss", PERCENTAGE) / 100, 12)
    conditions = Conditions(congestion_control=options.congestion_control, loss=loss)
    if settings.train.device not in ("auto", "cpu"):  # the work there is not known
        conditions = conditions.scaled(0.0)

    def per_replica(values: tuple[float, ...], flag: str, example: str) -> tuple[float, ...]:
        is_zero = flag != "--latency" and not all(values)
        if len(values) not in (1, replicas) or is_zero:
            problem = "has a value that is not above 0" if is_zero else f"has {len(values) or 'no'} values"
            ways = f"one for all {replicas} replicas or one for each, such as {example}"
            raise ConfigurationError(f"{flag} {problem}: give {ways}.")
        return values * (replicas // len(values))

    rates = per_replica(options.bandwidth or emulated.bandwidth, "--bandwidth", "500Mbit")
    latencies = per_replica(options.latency or emulated.latency or (0.0,), "--latency", "80ms")
    times = per_replica(options.step_time or emulated.step_time, "--step-time", "250ms")
    return Site(links=tuple(map(Link, rates, latencies)), step_time_s=times, conditions=conditions)


def _report(record: dict[str, Any]) -> str:
    own, model, site = record["prediction"], record["model"], record["site"]
    conditions, start, data_parallel = site["conditions"], record["data_parallel_steps"], record["data_parallel"]

    def each(form: Callable[[float], str], values: Iterable[float]) -> str:
        return ", ".join(map(form, sorted(set(values))))

    rates = each(format_rate, (link["bandwidth_bits_per_s"] for link in site["links"]))
    latencies = each(format_duration, (link["latency_s"] for link in site["links"]))
    typical, p90, ideal = (f"{own[f'{name}_utilization']:.1%}" for name in ("compute", "p90", "ideal"))
    work = [f"{1e9 * conditions[f'{name}_s_per_value']:.2g} ns per value for {name}s" for name in ("send", "merge")]
    sending = f"{record['cost_of_sending']:,.2f}"
    facts = {
        "model": f"{format_count(model['parameters'])} parameters"
        + (f", {model['layers']} layers, vocabulary of {model['vocabulary']:,}" if "layers" in model else ""),
        "memory": f"{format_bytes(model['memory_bytes'])} per replica, plus activations",
        "replicas": f"{len(site['links'])}, steps of {each(format_duration, site['step_time_s'])}",
        "links": f"{rates}, {latencies} one way, "
        f"{100 * conditions['loss']:.3g} % loss, {conditions['congestion_control']}",
        "settings": f"{record['algorithm']}, H = {own['inner_steps']}, P = {own['num_fragments']}, "
        f"tau = {own['overlap_steps']}, {own['codec']}",
        "utilisation": f"{typical} ({'also' if p90 == typical else p90} at p90 round time; {ideal} on emulated links)",
        "accuracy": record["accuracy"],
        "work": ", ".join(work) if record["work_is_known"] else "not measured, counted as none",
        "run": f"{record['steps']:,} steps in {format_duration(3600 * record['hours'])}"
        + (f"; {start:,} of them data-parallel, {format_duration(data_parallel['step_s'])} each" if start else ""),
        "sent": f"{format_bytes(record['sent_bytes_per_replica'])} per replica",
        **({"cost": f"{record['cost']:,.2f}, {sending} of it for sending"} if record["cost"] else {}),
    }
    fragments, limit_s = own["fragments"], record["round_timeout_s"]
    slowest_s = max(fragment["p90_round_s"] for fragment in fragments)
    if slowest_s > limit_s:
        facts["note"] = (
            f"rounds of up to {format_duration(slowest_s)} exceed network.round_timeout={format_duration(limit_s)}"
        )
    heads = ["fragment", "values", "first sent", "sent per round", "round", "at p90", "waiting per round"]
    names = [f"H = {row['inner_steps']}, {row['codec']}" for row in (own, *record["table"])]
    names = [f"{name} (as above)" if name == names[0] else name for name in names[1:]]
    others = ["other H and codecs, else the same", "utilisation", "at p90", "sent per step", "longest wait"]
    rows = []
    for name, row in zip([*names, "data-parallel, float32"], [*record["table"], data_parallel], strict=True):
        shares = (f"{row[share]:.1%}" for share in ("compute_utilization", "p90_utilization"))
        rows.append([name, *shares, format_bytes(row["sent_bytes_per_step"]), format_duration(row["longest_wait_s"])])
    tables = facts_table(facts), columns(heads, _fragment_rows(fragments)), columns(others, rows)
    return "\n\n".join(
        [*tables, "A smaller H synchronises more often. sign needs --error-feedback 1. The loss is not predicted."]
    )


def _fragment_rows(fragments: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each fragment, or one for several in a row that are alike."""

    def cells(fragment: dict[str, Any]) -> list[str]:
        times = (format_duration(fragment[name]) for name in ("round_s", "p90_round_s", "waited_s"))
        return [format_count(fragment["values"]), format_bytes(fragment["sent_bytes"]), *times]

    rows = []
    for (values, *costs), alike in itertools.groupby(fragments, key=cells):
        first, *_, last = [*alike] * 2
        names, steps = (
            f"{first[name]}" if first is last else f"{first[name]} to {last[name]}"
            for name in ("fragment", "first_step")
        )
        rows.append([names, values, f"step {steps}", *costs])
    return rows


@dataclass(frozen=True, kw_only=True)
class PresetsOptions:
    """List the model presets, for `diloco train --preset NAME`.

    Examples:
      diloco presets
      diloco train --preset streaming-35m --data texts/ --print-config
    """


def run_presets(arguments: Sequence[str]) -> int:
    """Print the table."""
    parse_options(PresetsOptions, "presets", arguments)
    rows = []
    for preset in PRESETS.values():
        values, model = preset_values(preset.name), preset.model
        heads = str(model.heads) if model.kv_heads is None else f"{model.heads}/{model.kv_heads}"
        inner_steps = values.get("sync.inner_steps", SyncSettings().inner_steps)
        numbers = (model.layers, model.width, model.ffn_width, heads, preset.vocab_size, inner_steps)
        rows.append([preset.name, f"{preset.parameters:,}", *map(str, numbers), str(values["train.steps"])])
    print(columns(["name", "parameters", "layers", "width", "ffn", "heads", "vocab", "H", "steps"], rows))
    return 0
