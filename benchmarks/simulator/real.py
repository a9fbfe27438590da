"""The runs of real processes that `benchmarks.wan` measured, and what `diloco plan` predicts for them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.wan.plan import LINKS, METHODS, Work
from benchmarks.wan.report import baseline_s, step_s
from diloco.algorithm import SyncSchedule, make_codec
from diloco.plan import Conditions, Deployment, Prediction, Traffic, fragment_sizes, predict
from diloco.transport import Link

RESULTS = Path(__file__).parents[1] / "wan" / "results.json"

OLD = ("paced", "stream", "real packets")
"""Parts of the names of rows that were measured with earlier versions, or with packets that a plan does not know of.
All of DiLoCo without streaming were."""

CORES = 2  # of the machine on which the rows were measured; more replicas share them
MOST_BY_OTHERS = 0.2  # rows during which other programs used more of the CPU are skipped


def compare() -> Iterator[dict[str, Any]]:
    """Yield one row for each run that was measured with the current version and not disturbed."""
    every = json.loads(RESULTS.read_text(encoding="utf-8"))
    bare_s = baseline_s(every)
    for row in every:
        name = f"{row['link']} {row['method']}"
        ours = row["method"].startswith("Streaming") and row["outcome"] == "finished"
        if not ours or any(part in name for part in OLD):
            continue
        if row["cpu_busy"] - (row["cpu_workers"] or 0) > MOST_BY_OTHERS:
            continue
        cost, measured_s = _predict(row, bare_s), step_s(row)
        times_s = zip(*(replica["transfers_s"] for replica in row["replicas"]), strict=True)
        yield {
            "link": row["link"],
            "method": row["method"],
            "measured": {"step_s": measured_s, "compute_utilization": bare_s / measured_s},
            "predicted": {"step_s": cost.step_s, "compute_utilization": bare_s / cost.step_s},
            "rounds_s": [round(mean(each), 4) for each in times_s],
            "round_s": max(each.round_s for each in cost.fragments),
            "p90_round_s": max(each.p90_round_s for each in cost.fragments),
        }


def _predict(row: Mapping[str, Any], bare_s: float) -> Prediction:
    link, work = next(link for link in LINKS if link.name == row["link"]), Work(**row["work"])
    options = next(method.options for method in METHODS if method.name == row["method"])
    rates = [min(rate, link.rate_bits_per_s) for rate in link.up_bits_per_s]  # a round needs both directions
    rates += [link.rate_bits_per_s] * (link.replicas - len(rates))
    usual, sharing = Conditions(), max(1.0, link.replicas / CORES)
    conditions = Conditions(
        congestion_control="cubic" if link.congestion_control == "cubic" else "bbr",  # the machine's default
        loss=link.loss_percent / 100,
        send_s_per_value=sharing * usual.send_s_per_value,
        merge_s_per_value=sharing * usual.merge_s_per_value,
    )
    schedule = SyncSchedule(
        inner_steps=work.inner_steps, num_fragments=work.num_fragments, overlap_steps=work.overlap_steps
    )
    exchange = Traffic(
        schedule=schedule,
        fragment_sizes=fragment_sizes(work.values, work.layers, work.num_fragments),
        codec=make_codec(options["codec"]),
        mean=options.get("mean_codec", "auto"),
    )
    links = tuple(Link(rate, link.rtt_s / 2) for rate in rates)
    return predict(exchange, Deployment(links=links, step_time_s=(bare_s,) * link.replicas, conditions=conditions))
