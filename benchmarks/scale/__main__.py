"""``python -m benchmarks.scale``: simulate up to 1000 replicas of 400B parameters, and write the tables into README.md.

Every table is one call of `benchmarks.scale.sweep.sweep`; all rows are kept in results.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.markdown import table, write_below
from benchmarks.scale.churn import Churn, void_probability
from benchmarks.scale.round_cost import RoundCost
from benchmarks.scale.sweep import sweep
from diloco.algorithm import make_codec
from diloco.plan import Workload

HERE = Path(__file__).parent
MARKER = "<!-- what follows is written by python -m benchmarks.scale -->"

MODELS = {
    "1B": Workload(parameters=10**9, layers=24, step_time_s=0.1),
    "10B": Workload(parameters=10**10, layers=48, step_time_s=0.8),
    "100B": Workload(parameters=10**11, layers=108, step_time_s=4.9),
    "400B": Workload(parameters=4 * 10**11, layers=126, step_time_s=26.9),
}
REPLICAS = (2, 4, 8, 16, 32, 64, 125, 250, 500, 1000)
DAY_S = 86_400.0
MTBFS = {"1 day": DAY_S, "1 week": 7 * DAY_S, "1 year": 365 * DAY_S}
FRAGMENT = 10**11 // 36
SHORT = {"all-gather": "AG", "reduce-scatter": "RS"}

Row = dict[str, Any]


def costs() -> tuple[list[Row], str]:
    """Return what one round costs, by the number of replicas."""
    rows: list[Row] = []
    for name in ("fp4", "bfloat16", "float32"):
        for number in REPLICAS:
            rows.append({"codec": name, "replicas": number, **vars(RoundCost.of(make_codec(name), FRAGMENT, number))})
    by = {(row["codec"], row["replicas"]): row for row in rows}
    head = ["replicas", "fp4", "bfloat16", "float32", "buffers, fp4 (GB)", "connections", "headers and votes"]
    body = []
    for number in REPLICAS:
        chosen = [by[name, number] for name in ("fp4", "bfloat16", "float32")]
        cells = [f"{row['bytes_per_value']:.2f} ({SHORT[row['pattern']]})" for row in chosen]
        row = by["fp4", number]
        buffers = f"{row['room_bytes'] / 1e9:.1f}"
        body.append([number, *cells, buffers, f"{row['connections']:,}", f"{row['messages']:,}"])
    text = (
        "Bytes per value that the busiest replica moves each way in a round with means in float32 (AG: all-gather, RS: "
        "reduce-scatter); the buffers that it allocates for a round of one fragment of 100B parameters "
        f"({FRAGMENT / 1e9:.2f}B values); the connections of one replica; the messages of all replicas per round.\n\n"
    )
    return rows, text + table(head, body)


def pivot(rows: Sequence[Row], key: str, cell: str = "compute_utilization") -> str:
    """Return a table with one column per number of replicas, in per cent."""
    names = list(dict.fromkeys(row[key] for row in rows))
    numbers = list(dict.fromkeys(row["replicas"] for row in rows))
    by = {(row[key], row["replicas"]): row for row in rows}
    body = [[name, *(f"{100 * by[name, number][cell]:.1f}" for number in numbers)] for name in names]
    return table(["", *map(str, numbers)], body)


def links() -> tuple[list[Row], str]:
    """Return the compute utilisation by model, codec and link, without losses."""
    rows = list(
        sweep(
            MODELS,
            replicas=REPLICAS,
            codecs=[make_codec("fp4"), make_codec("bfloat16")],
            bandwidths_bits_per_s=[2e8, 1e9, 1e10],
            cycles=4,
        )
    )
    for row in rows:
        row["case"] = f"{row['model']}, {row['codec']}, {row['bandwidth_bits_per_s'] / 1e9:g} Gbit/s"
    text = "Compute utilisation (%) by number of replicas; H = 100, tau = 5, a round trip of 80 ms, no losses.\n\n"
    text += pivot(rows, "case")
    text += "\n\nTime of one round (s), fp4, from the first contribution to the commit:\n\n"
    shown = [row for row in rows if row["codec"] == "fp4" and row["replicas"] in (2, 8, 64, 1000)]
    by = {(row["model"], row["bandwidth_bits_per_s"], row["replicas"]): row for row in shown}
    body = [
        [
            model,
            f"{rate / 1e9:g} Gbit/s",
            *(f"{by[model, rate, number]['round_s']:,.1f}" for number in (2, 8, 64, 1000)),
        ]
        for model in MODELS
        for rate in (2e8, 1e9, 1e10)
    ]
    return rows, text + table(["model", "link", "2", "8", "64", "1000"], body)


def periods() -> tuple[list[Row], str]:
    """Return the effect of a larger H on a link of 1 Gbit/s."""
    rows: list[Row] = []
    for inner_steps in (100, 300, 1000):
        for row in sweep(
            {name: MODELS[name] for name in ("1B", "100B")},
            replicas=(2, 8, 64, 1000),
            codecs=[make_codec("fp4")],
            bandwidths_bits_per_s=[1e9],
            inner_steps=inner_steps,
            overlap_steps=inner_steps // 20,
            cycles=4,
        ):
            rows.append(row | {"case": f"{row['model']}, H = {inner_steps}, tau = {inner_steps // 20}"})
    return rows, "Compute utilisation (%), fp4, 1 Gbit/s, no losses.\n\n" + pivot(rows, "case")


def jitters() -> tuple[list[Row], str]:
    """Return the effect of steps of random length (stragglers)."""
    rows: list[Row] = []
    for overlap_steps in (0, 5):
        for row in sweep(
            {name: MODELS[name] for name in ("1B", "100B")},
            replicas=REPLICAS,
            codecs=[make_codec("fp4")],
            bandwidths_bits_per_s=[1e11],
            jitters=[0.0, 0.05, 0.2, 0.5],
            overlap_steps=overlap_steps,
            cycles=4,
        ):
            rows.append(row | {"case": f"{row['model']}, tau = {overlap_steps}, jitter {row['jitter']:g}"})
    text = (
        "Compute utilisation (%), fp4, 100 Gbit/s, no losses. Jitter is a step's standard deviation over its mean.\n\n"
    )
    return rows, text + pivot(rows, "case")


VARIANTS: dict[str, tuple[Literal["first", "spread"], bool, float]] = {
    "today": ("first", True, 0.5),
    "spread": ("spread", False, 0.5),
    "spread, 20 %": ("spread", False, 0.2),
}
"""The donors, whether joiners fetch changed fragments in their merges, and their share of a link."""

LOST = {"1B": ("today",), "100B": tuple(VARIANTS), "400B": ("today", "spread, 20 %")}


def losses() -> tuple[list[Row], str]:
    """Return the effect of losses and joiners, with the transport of version 0.3.0 and with two changes."""
    rows: list[Row] = []
    for name, variants in LOST.items():
        for variant in variants:
            donors, refetch, share = VARIANTS[variant]
            churns = [
                Churn(mtbf_s=mtbf_s, donors=donors, refetch=refetch, state_share=share)
                for mtbf_s in (*([math.inf] if variant == "today" else []), *MTBFS.values())
            ]
            for row in sweep(
                {name: MODELS[name]},
                replicas=(8, 64, 250, 1000),
                codecs=[make_codec("fp4")],
                bandwidths_bits_per_s=[1e10],
                churns=churns,
                cycles=40,
            ):
                expected = void_probability(
                    row["replicas"] * row["members_share"],
                    row["round_s"],
                    Churn(mtbf_s=row["mtbf_s"]),
                    overlap_s=5 * MODELS[name].step_time_s,
                )
                rows.append(row | {"variant": variant, "void_expected": expected})
    names = {value: name for name, value in MTBFS.items()} | {math.inf: "never"}
    body = [
        [
            row["model"],
            row["variant"],
            names[row["mtbf_s"]],
            row["replicas"],
            f"{row['losses']}, {row['joins']}",
            f"{100 * row['void_rounds'] / row['rounds']:.1f} ({100 * row['void_expected']:.1f})",
            f"{100 * row['goodput']:.1f}",
            f"{100 * row['compute_utilization']:.1f}",
            f"{100 * row['members_share']:.1f}",
            f"{row['staleness']:.2f}",
        ]
        for row in rows
    ]
    text = (
        "fp4, 10 Gbit/s, 40 cycles of H = 100 steps that all replicas begin. A lost replica is away for 10 minutes in "
        "the mean; half of the losses are noticed after 15 s of silence, the others at once. `today` (0.3.0): a joiner "
        "asks the first member, gets half of its link, and fetches in its own merges what has changed. `spread`: it "
        "asks any free member and fetches nothing in a merge. `spread, 20 %`: it gets a fifth of the link. The columns "
        "from void to members are percentages, void rounds by `void_probability` in brackets; staleness is in H.\n\n"
    )
    head = ["model", "joiners", "MTBF", "replicas", "losses, joins", "void", "goodput", "CU", "members", "staleness"]
    return rows, text + table(head, body)


def joiners() -> tuple[list[Row], str]:
    """Return the number of replicas up to which one donor keeps up with the joiners."""
    rows: list[Row] = []
    for name, workload in MODELS.items():
        for rate in (1e9, 1e10):
            download_s = 8 * 8 * workload.parameters / (Churn().state_share * rate)
            most = {label: math.floor((mtbf + 600 + download_s) / download_s) for label, mtbf in MTBFS.items()}
            rows.append({"model": name, "bandwidth_bits_per_s": rate, "download_s": download_s, "most_replicas": most})
    body = [
        [row["model"], f"{row['bandwidth_bits_per_s'] / 1e9:g} Gbit/s", f"{row['download_s']:,.0f}"]
        + [f"{most:,}" for most in row["most_replicas"].values()]
        for row in rows
    ]
    text = (
        "The time of a joiner's download (s) at half of the link, and by MTBF the largest number of replicas for which "
        "one donor keeps up with the joiners, `(MTBF + away) / download + 1`.\n\n"
    )
    return rows, text + table(["model", "link", "download", *MTBFS], body)


SECTIONS = {
    "What a round costs": costs,
    "Links": links,
    "Fewer rounds": periods,
    "Stragglers": jitters,
    "Losses": losses,
    "Joiners": joiners,
}


def finite(row: Mapping[str, Any]) -> Row:
    """Return the row with None in place of infinity, which JSON lacks."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def as_json(about: Row, results: Mapping[str, Sequence[Row]]) -> str:
    """Return JSON with one row per line."""
    sections = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in about.items()]
    for title, rows in results.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        sections.append(f"{json.dumps(title)}: [\n  {lines}\n ]")
    return "{\n " + ",\n ".join(sections) + "\n}\n"


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__).parse_args()
    started_s, results, text = time.perf_counter(), {}, []
    for title, section in SECTIONS.items():
        begun_s = time.perf_counter()
        rows, shown = section()
        results[title] = [finite(row) for row in rows]
        text += [f"## {title}", shown]
        print(f"{title}: {len(rows)} rows, {time.perf_counter() - begun_s:.0f} s", flush=True)
    took_s = time.perf_counter() - started_s
    text.append(f"All tables took {took_s:.0f} s, in one thread.")
    (HERE / "results.json").write_text(as_json({"took_s": round(took_s)}, results), encoding="utf-8")
    write_below(MARKER, "\n\n".join(text) + "\n", HERE / "README.md")


if __name__ == "__main__":
    main()
