"""``diloco plan`` and ``diloco presets``: what settings cost on a link, which others fit it, and which there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from diloco.algorithm import SyncSettings
from diloco.config import (
    Configuration,
    asked_values,
    compose_for_model,
    flatten,
    parse_flags,
    parse_options,
    preset_values,
    to_toml,
)
from diloco.devices import PEAKS, known_peak_flops_per_s
from diloco.errors import ConfigurationError, from_extra
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
    from diloco.plan import Deployment, Prediction, Traffic

DESCRIPTION = """Say whether a link is good enough for the settings of `diloco train`, and which to take instead if it
is not. Below that: compute utilisation, bytes and waiting, for each fragment, for other H and
codecs, and on slower and faster links.

Takes the TOML file and the flags of `diloco train`; what does not touch the link has
no effect. Nothing is trained or sent, and the loss is not predicted.

Examples:
  diloco plan run.toml --bandwidth 100Mbit --latency 50ms --step-time 250ms
  diloco plan --preset 1b --replicas 4 --bandwidth 500Mbit --latency 80ms --step-time 0.8s
  diloco plan --parameters 7B --gpus "8 H100" --inner-steps 200 --bandwidth 1Gbit --round-trip 60ms
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
    round_trip: tuple[Duration, ...] = ()
    """Round-trip time, as `ping` and `diloco doctor` print it, in place of the latency, which is half of it."""
    step_time: tuple[Duration, ...] = ()
    """Compute time of one inner step, such as 0.8s; one value for all replicas, or one for each."""
    gpus: str | None = None
    """GPUs of a replica, such as "8 H100", in place of the step time: that of `--mfu`."""
    mfu: Annotated[float, Meta(gt=0, le=1)] = 0.4
    """Share of the GPUs' peak rate (bfloat16) that training reaches. One H100 was measured at 0.43 (150M) to 0.46
    (1.1B) compiled, 0.24 to 0.35 not compiled."""
    parameters: str | None = None
    """Plan for any model of so many parameters, such as 7B, in fragments of equal size. All else is by default that of
    the preset which is nearest in size."""
    congestion_control: Literal["bbr", "cubic", "reno"] = "cubic"
    """TCP congestion control of the senders; see `sysctl net.ipv4.tcp_congestion_control`."""
    loss: str = "0%"
    """Packet loss of the links, in per cent."""
    price_per_hour: Annotated[float, Meta(ge=0)] = 0.0
    """Price of one hour of one replica, such as 3.7, in any currency."""
    price_per_gb: Annotated[float, Meta(ge=0)] = 0.0
    """Price of sending 10^9 bytes (egress), such as 0.08."""
    plot: Path | None = None
    """Also draw the utilisation over the bandwidth of the links into this file, such as plan.svg."""
    json: bool = False
    """Print one JSON object."""


BETWEEN_SITES = {"network.transport": "tcp"}
"""What a run sets that has links. Presets begin otherwise there than in one process or on a cluster."""

BANDWIDTHS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 1e11)
"""The bandwidths of the fastest link, in bits per second, for which the utilisation is listed."""

OWN = {field.name for field in fields(PlanSettings)} - {field.name for field in fields(Configuration)}


def run_plan(arguments: Sequence[str]) -> int:
    """Print the cost of the settings, and the table of others."""
    shown = flatten(PlanSettings()) | BETWEEN_SITES | preset_values(PlanSettings.preset, BETWEEN_SITES)
    common = [*(name for name in shown if name in OWN), *SHOWN]
    line = parse_flags(PlanSettings, "plan", DESCRIPTION, arguments, shown=shown, common=common)
    options = PlanSettings(**{name: value for name, value in line.values.items() if name in OWN})
    of_run = {name: value for name, value in line.values.items() if name not in OWN}
    nearest = {} if options.parameters is None else {"preset": _nearest_preset(options.parameters)}
    emulated = any(name.startswith("emulate.") for name in asked_values(replace(line, values=of_run)))
    defaults = nearest if emulated else BETWEEN_SITES | nearest  # only a run in one process emulates links
    configuration = compose_for_model(replace(line, values=of_run, defaults=defaults))
    settings, model, sizes = _model(options, configuration)
    if line.print_config:
        print(to_toml(settings))
        return 0
    record = _record(options, settings, model, sizes)
    if options.plot is not None:
        _draw(record, options.plot.expanduser())
    print(to_json(record, indent=2) if options.json else _report(record))
    return 0


def _nearest_preset(parameters: str) -> str:
    """Return the name of the preset that is nearest in size, as a ratio."""
    number = max(1.0, parse(parameters, "--parameters", COUNT))
    return min(PRESETS, key=lambda name: abs(math.log(PRESETS[name].parameters / number)))


def _model(
    options: PlanSettings, configuration: Configuration
) -> tuple[Configuration, dict[str, Any], tuple[int, ...]]:
    """Return the resolved settings, facts about the model, and the number of values in each fragment."""
    from diloco.data import corpus_vocabulary_size
    from diloco.model import check_vocabulary
    from diloco.plan import fragment_sizes
    from diloco.train import make_fragments, outline, replica_bytes, resolve

    if configuration.network.elastic and configuration.network.run is None:
        named = replace(configuration.network, run="plan")  # a plan needs no name for its swarm
        configuration = replace(configuration, network=named)
    emulate = configuration.emulate  # which only some transports may have
    configuration = replace(configuration, emulate=EmulateSettings())
    if options.parameters is not None:
        if configuration.sync.at_home:
            raise ConfigurationError(
                "sync.arguments.average.at_home names parameters of a model, of which --parameters only gives the "
                "number. Use --preset or --model instead of one of the two."
            )
        total = round(parse(options.parameters, "--parameters", COUNT))
        facts: dict[str, Any] = {"flops_per_token": 6.0 * total}
        nearest = PRESETS[_nearest_preset(options.parameters)]
        layers = nearest.model.layers if configuration.sync.num_fragments is None else None
        settings = resolve(configuration, num_layers=layers)
        number = settings.sync.num_fragments or 1
        sizes = fragment_sizes(total, number, number)
    else:
        here = tuple(path for path in configuration.data.paths if Path(path).expanduser().exists())
        size = configuration.model.vocab_size or corpus_vocabulary_size(replace(configuration.data, paths=here))
        built = outline(configuration, size)
        check_vocabulary(built, size)
        total = built.num_parameters()
        facts = {"layers": built.num_layers, "vocabulary": built.vocab_size}
        configuration = replace(configuration, model=with_vocabulary(configuration.model, size))
        settings = resolve(configuration, num_layers=built.num_layers, max_sequence_length=built.max_sequence_length)
        facts |= {"trained": built.num_trained()}
        facts["flops_per_token"] = built.flops_per_token(settings.train.sequence_length)
        sizes = tuple(fragment.numel for fragment in make_fragments(settings.sync, built))
    trained = facts.get("trained", sum(sizes))  # what stays at home is in no fragment
    memory_bytes = replica_bytes(settings, trained, total - trained)
    model = {"parameters": total, "trained": trained, **facts, "memory_bytes": memory_bytes}
    return replace(settings, emulate=emulate), model, sizes


def _record(
    options: PlanSettings, settings: Configuration, model: dict[str, Any], sizes: Sequence[int]
) -> dict[str, Any]:
    from diloco.plan import ACCURACY, Traffic, decide, predict, run_cost, table

    deployment = _deployment(options, settings, model["flops_per_token"])
    traffic = Traffic.of(settings, sizes)
    own, gradients = predict(traffic, deployment), predict(Traffic.of_gradients(sum(sizes)), deployment)
    steps = settings.train.steps
    start = 0 if settings.algorithm == "data-parallel" else settings.train.data_parallel_steps
    run = run_cost(own, gradients, steps, start)
    decision = decide(traffic, deployment, steps, start)
    hours = run.wall_s / 3600
    machines, sending = options.price_per_hour * hours, options.price_per_gb * run.sent_bytes / 1e9
    return {
        "decision": asdict(decision),
        "model": model,
        "site": asdict(deployment),
        "work_is_known": deployment.conditions.send_s_per_value > 0,
        "preset": settings.preset,
        "algorithm": settings.algorithm,
        "prediction": asdict(own),
        "data_parallel": asdict(gradients),
        "accuracy": ACCURACY,
        "round_timeout_s": settings.network.round_timeout,
        "run": asdict(run),
        "hours": hours,
        "cost": len(deployment.links) * (machines + sending),
        "cost_of_sending": len(deployment.links) * sending,
        "table": [asdict(row) for row in table(traffic, deployment, most_steps=steps - start)],
        "curves": _curves(traffic, deployment, decision.rounds),
    }


def _curves(traffic: Traffic, deployment: Deployment, chosen: Prediction) -> dict[str, Any]:
    """Return the utilisation of the candidates over the bandwidth of the links, all scaled alike."""
    from diloco.algorithm import make_codec
    from diloco.plan import Traffic, curve

    own, most = traffic.schedule, max(link.bandwidth_bits_per_s for link in deployment.links)
    candidates = {_name(own.inner_steps, own.num_fragments, own.overlap_steps, traffic.codec.name): traffic}
    schedule = replace(own, inner_steps=chosen.inner_steps, overlap_steps=chosen.overlap_steps, offsets=None)
    name = _name(chosen.inner_steps, chosen.num_fragments, chosen.overlap_steps, chosen.codec)
    candidates.setdefault(
        name, replace(traffic, schedule=schedule, codec=make_codec(chosen.codec), gradients=chosen.inner_steps == 1)
    )
    candidates["data-parallel, float32"] = Traffic.of_gradients(sum(traffic.fragment_sizes))
    factors = [rate / most for rate in BANDWIDTHS]
    return {
        "bandwidth_bits_per_s": BANDWIDTHS,
        "compute_utilization": {name: curve(candidate, deployment, factors) for name, candidate in candidates.items()},
    }


def _name(inner_steps: int, num_fragments: int, overlap_steps: int, codec: str) -> str:
    return f"H = {inner_steps}, P = {num_fragments}, tau = {overlap_steps}, {codec}"


def _deployment(options: PlanSettings, settings: Configuration, flops_per_token: float) -> Deployment:
    from diloco.plan import Conditions, Deployment
    from diloco.transport import Link

    emulated, replicas = settings.emulate, settings.network.replicas
    loss = round(parse(options.loss, "--loss", PERCENTAGE) / 100, 12)
    conditions = Conditions(congestion_control=options.congestion_control, loss=loss)
    if options.gpus is not None or settings.train.device not in ("auto", "cpu"):  # the work there is not known
        conditions = conditions.scaled(0.0)

    def per_replica(values: tuple[float, ...], flag: str, example: str) -> tuple[float, ...]:
        is_zero = flag != "--latency" and not all(values)
        if len(values) not in (1, replicas) or is_zero:
            problem = "has a value that is not above 0" if is_zero else f"has {len(values) or 'no'} values"
            ways = f"one for all {replicas} replicas or one for each, such as {example}"
            raise ConfigurationError(f"{flag} {problem}: give {ways}.")
        return values * (replicas // len(values))

    rates = per_replica(options.bandwidth or emulated.bandwidth, "--bandwidth", "500Mbit")
    if options.round_trip and options.latency:
        raise ConfigurationError("--round-trip and --latency say the same: the latency is half of the round trip.")
    one_way = tuple(round_trip / 2 for round_trip in options.round_trip) or options.latency or emulated.latency
    latencies = per_replica(one_way or (0.0,), "--latency", "80ms")
    step_times = options.step_time or emulated.step_time
    if options.gpus is not None:
        if step_times:
            raise ConfigurationError("--gpus and --step-time both say how long an inner step takes: give one of them.")
        tokens = settings.train.batch_size * settings.train.sequence_length
        step_times = (flops_per_token * tokens / (options.mfu * _peak_flops_per_s(options.gpus)),)
    times = per_replica(step_times, "--step-time", "250ms, or --gpus '8 H100'")
    return Deployment(links=tuple(map(Link, rates, latencies)), step_time_s=times, conditions=conditions)


def _peak_flops_per_s(gpus: str) -> float:
    """Return the peak rate in bfloat16 of GPUs such as "8 H100"."""
    number, _, rest = gpus.strip().partition(" ")
    count, name = (int(number), rest.strip()) if number.isdecimal() else (1, gpus.strip())  # a name may have a space
    known = "|".join(pattern for pattern, *_ in PEAKS).split("|")
    peak = known_peak_flops_per_s(name, "bfloat16") if name in known else None
    if not count or peak is None:
        raise ConfigurationError(
            f"--gpus {gpus!r} is not a number and a name of {', '.join(known)}. Give the time of an inner step as "
            "--step-time."
        )
    return count * peak


def _decision(record: dict[str, Any]) -> str:
    """Return what to do, in a sentence or two that name flags."""
    decision, own = record["decision"], record["prediction"]
    rounds, run, now = decision["rounds"], decision["run"], record["run"]
    keeps = f"{run['compute_utilization']:.0%} of the time goes into training"
    sends = f"each replica sends {format_bytes(run['sent_bytes'])} in {format_duration(run['wall_s'])}"
    if run["sent_bytes"] > run["sent_bytes_per_day"]:  # it takes longer than a day
        sends = f"each replica sends {format_bytes(run['sent_bytes_per_day'])} a day"
        sends += " after its start" if run["start_steps"] else ""
    flags = {
        "--algorithm diloco": record["algorithm"] == "data-parallel" and rounds["inner_steps"] > 1,
        f"--inner-steps {rounds['inner_steps']}": rounds["inner_steps"] != own["inner_steps"],
        f"--overlap-steps {rounds['overlap_steps']}": rounds["overlap_steps"] != own["overlap_steps"],
        f"--codec {rounds['codec']}": rounds["codec"] != own["codec"],
        f"--data-parallel-steps {run['start_steps']}": run["start_steps"] != now["start_steps"],
    }
    changes = " ".join(flag for flag, differs in flags.items() if differs)
    if decision["verdict"] == "keep":
        return f"Your link is good enough for these settings: {keeps}, and {sends}."
    as_given = f"With the settings as given it is {now['compute_utilization']:.0%}"
    if now["start_s"] > 0.05 * now["wall_s"]:
        as_given += (
            f": the shared start of {now['start_steps']:,} steps alone takes {format_duration(now['start_s'])} of "
            f"{format_duration(now['wall_s'])}"
        )
    if decision["verdict"] == "take":
        shorter = " A shorter shared start may cost loss." if run["start_steps"] < now["start_steps"] else ""
        return f"Take {changes}: {keeps}, and {sends}. {as_given}.{shorter}"
    needed = decision["needed_bits_per_s"]
    best = f"at best {rounds['compute_utilization']:.0%} of the time after the start goes into training"
    best += f" ({changes})" if changes else ""
    remedy = "No bandwidth would do for these settings, because of the latency."
    if needed is not None:
        remedy = f"These settings need about {format_rate(needed)} after the start. Or take a smaller model."
    return f"This link is too slow for this model: {best}. {as_given}. {remedy}"


def _report(record: dict[str, Any]) -> str:
    own, model, site, run = record["prediction"], record["model"], record["site"], record["run"]
    conditions, start, data_parallel = site["conditions"], run["start_steps"], record["data_parallel"]

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
        "settings": f"{record['preset']}: {record['algorithm']}, H = {own['inner_steps']}, P = {own['num_fragments']}, "
        f"tau = {own['overlap_steps']}, {own['codec']}",
        "utilisation": f"{run['compute_utilization']:.1%} of the whole run",
        "of rounds": f"{typical} ({'also' if p90 == typical else p90} at p90 round time; {ideal} on emulated links)",
        "accuracy": record["accuracy"],
        "work": ", ".join(work) if record["work_is_known"] else "not measured, counted as none",
        "run": f"{run['steps']:,} steps in {format_duration(run['wall_s'])}"
        + (f"; {start:,} of them data-parallel, {format_duration(data_parallel['step_s'])} each" if start else ""),
        "sent": f"{format_bytes(run['sent_bytes'])} per replica",
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
    curves = record["curves"]
    over = [f"utilisation over {_axis(site)}", *map(format_rate, curves["bandwidth_bits_per_s"])]
    lines = [[name, *(f"{share:.0%}" for share in row)] for name, row in curves["compute_utilization"].items()]
    tables = facts_table(facts), columns(heads, _fragment_rows(fragments)), columns(over, lines), columns(others, rows)
    note = "A smaller H synchronises more often. sign needs --error-feedback 1. The loss is not predicted."
    return "\n\n".join([_decision(record), *tables, note])


def _axis(site: dict[str, Any]) -> str:
    """Return what a scale of bandwidths means; links of several speeds are all scaled alike."""
    rates = {link["bandwidth_bits_per_s"] for link in site["links"]}
    return "bandwidth of the fastest" if len(rates) > 1 else "bandwidth"


def _draw(record: dict[str, Any], path: Path) -> None:
    """Draw the utilisation over the bandwidth, as Fig. 8 of Streaming DiLoCo does, into an image file."""
    with from_extra("plots", "--plot draws with matplotlib"):
        import matplotlib as mpl
        from matplotlib import pyplot

    mpl.use("agg")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    rates = [rate / 1e6 for rate in record["curves"]["bandwidth_bits_per_s"]]
    for name, shares in record["curves"]["compute_utilization"].items():
        axes.plot(rates, [100 * share for share in shares], marker="o", label=name)
    axes.axvline(
        max(link["bandwidth_bits_per_s"] for link in record["site"]["links"]) / 1e6, color="0.6", linestyle=":"
    )
    axes.set(xscale="log", xlabel=f"{_axis(record['site'])}, Mbit/s", ylabel="compute utilisation, %", ylim=(0, 102))
    axes.legend()
    try:
        figure.savefig(path, format=path.suffix.removeprefix("."))  # else a name without one gets another
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path} can't be written: {error}. Name a file such as plan.svg.") from error


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
