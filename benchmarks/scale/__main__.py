"""``python -m benchmarks.scale``: simulate up to 1000 replicas of 400B parameters, and write the tables into README.md.

All rows are kept in results.jsonl.
"""

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table, write_below
from diloco.algorithm import SyncSchedule, make_codec, plan_exchange
from diloco.plan import IDEAL, Deployment, Traffic, fragment_sizes, simulate
from diloco.transport import Link, streams_to_each

HERE = Path(__file__).parent
MARKER = "<!-- what follows is written by python -m benchmarks.scale -->"

MODELS = {  # name -> number of parameters, layers, and compute time of an inner step in seconds
    "1B": (10**9, 24, 0.1),
    "10B": (10**10, 48, 0.8),
    "100B": (10**11, 108, 4.9),
    "400B": (4 * 10**11, 126, 26.9),
}
REPLICAS = (2, 4, 8, 16, 32, 64, 125, 250, 500, 1000)
FRAGMENT = 10**11 // 36
SHORT = {"all-gather": "AG", "reduce-scatter": "RS"}

Row = dict[str, Any]


def cost(name: str, replicas: int) -> Row:
    """Return what a round of one fragment costs by the trainer's own plan.

    ``bytes_per_value``: what the busiest replica moves each way; ``messages``: the headers and votes of all;
    ``connections``: those of a replica with one process; ``room_bytes``: the buffers for payloads and the sum.
    """
    codec, others = make_codec(name), replicas - 1
    plan = plan_exchange(codec, FRAGMENT, replicas)
    start, stop = max(plan.shards, key=lambda shard: shard[1] - shard[0])
    incoming = codec.payload_bytes(FRAGMENT if plan.pattern == "all-gather" else stop - start)
    return {
        "codec": name,
        "replicas": replicas,
        "pattern": plan.pattern,
        "bytes_per_value": plan.busiest_bytes / FRAGMENT,
        "messages": 2 * replicas * others,
        "connections": others * (streams_to_each(others) + 1),
        "room_bytes": others * incoming + 4 * FRAGMENT,
    }


def costs() -> tuple[list[Row], str]:
    """Return what one round costs, by the number of replicas."""
    rows = [cost(name, number) for number in REPLICAS for name in ("fp4", "bfloat16", "float32")]
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


def utilization(codec: str, rate: float, inner_steps: int, overlap_steps: int, names: Sequence[str]) -> list[Row]:
    """Return a row for each model and number of replicas on equal links with a round trip of 80 ms, without losses."""
    rows = []
    for name, number in itertools.product(names, REPLICAS):
        parameters, layers, step_s = MODELS[name]
        fragments = min(math.ceil(layers / 3), inner_steps)
        schedule = SyncSchedule(inner_steps=inner_steps, num_fragments=fragments, overlap_steps=overlap_steps)
        site = Deployment(links=(Link(rate, 0.04),) * number, step_time_s=(step_s,) * number, conditions=IDEAL)
        sizes = fragment_sizes(parameters, layers, fragments)
        exchange = Traffic(schedule=schedule, fragment_sizes=sizes, codec=make_codec(codec))
        run = simulate(schedule, exchange.parcels(number), site, steps=7 * inner_steps, measure_from=3 * inner_steps)
        about = {"model": name, "codec": codec, "bandwidth_bits_per_s": rate, "inner_steps": inner_steps}
        rows.append(about | {"replicas": number, "compute_utilization": run.compute_utilization})
    return rows


def pivot(rows: Sequence[Row], case: str) -> str:
    """Return a table with one column per number of replicas, in per cent; ``case`` formats the first cell."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        first = case.format(**row, gbit=row["bandwidth_bits_per_s"] / 1e9)
        cells.setdefault(first, []).append(f"{100 * row['compute_utilization']:.1f}")
    return table(["", *map(str, REPLICAS)], [[first, *of_case] for first, of_case in cells.items()])


def links() -> tuple[list[Row], str]:
    """Return the compute utilisation by model, codec and link."""
    cases = itertools.product(MODELS, ("fp4", "bfloat16"), (2e8, 1e9, 1e10))
    rows = [row for name, codec, rate in cases for row in utilization(codec, rate, 100, 5, [name])]
    text = "Compute utilisation (%) by number of replicas; H = 100, tau = 5, a round trip of 80 ms, no losses.\n\n"
    return rows, text + pivot(rows, "{model}, {codec}, {gbit:g} Gbit/s")


def periods() -> tuple[list[Row], str]:
    """Return the effect of a larger H on a link of 1 Gbit/s."""
    rows = [row for H in (100, 300, 1000) for row in utilization("fp4", 1e9, H, H // 20, ["1B", "100B"])]
    text = "Compute utilisation (%), fp4, 1 Gbit/s, tau = H / 20, no losses.\n\n"
    return rows, text + pivot(rows, "{model}, H = {inner_steps}")


SECTIONS = {"What a round costs": costs, "Links": links, "Fewer rounds": periods}


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__).parse_args()
    text: list[str] = []
    lines: list[Mapping[str, Any]] = []
    for title, section in SECTIONS.items():
        rows, shown = section()
        lines += [{"table": title, **row} for row in rows]
        text += [f"## {title}", shown]
    (HERE / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    write_below(MARKER, "\n\n".join(text) + "\n", HERE / "README.md")


if __name__ == "__main__":
    main()
