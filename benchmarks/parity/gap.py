"""``python -m benchmarks.parity.gap``: draw the gap to data-parallel training over model size as gap.svg.

A point is the best Streaming run relative to the best data-parallel run of the same model, optimizer and number of
tokens, each with the settings that suit it. Lines are the fits of 2503.09799.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib import pyplot

from benchmarks.parity.losses import heldout_loss
from benchmarks.parity.stacked import settings as without_results

HERE = Path(__file__).parent
LAW = {0: (18.129, -0.0953), 2: (18.768, -0.0969), 4: (19.762, -0.0992)}  # M; 0: data-parallel; loss = A N^alpha
FITTED = 35e6, 2.4e9  # parameters
MULOCO = {  # 2505.23725: parameters, losses of data-parallel and of 16 replicas with Muon
    150e6: (3.124, 3.222),
    416e6: (2.641, 2.713),
    914e6: (2.402, 2.448),
    1.76e9: (2.246, 2.291),
    3.1e9: (2.128, 2.165),
    15e9: (1.864, 1.917),
}
STEPS = {2910: 298_656, 8500: 869_760, 2125: 869_760}  # of runs in studies.jsonl: the parameters of their models
PLAIN = {"algorithm", "seed", "optimizer", "betas", "learning_rate", "outer_learning_rate", "outer_momentum"}
Key = tuple[int, str, bool]  # parameters, optimizer, whether data-parallel


def runs() -> Iterator[tuple[Key, str, int, float]]:
    """Yield the key, the other settings, the seed and the held-out loss of runs with 20 tokens per parameter."""
    for name in ("stacked.jsonl", "stacked_cuda.jsonl"):
        for row in read(name):
            settings = without_results(row)
            if settings.keys() <= PLAIN:
                data_parallel = settings.pop("algorithm", "") == "data-parallel"
                seed, optimizer = settings.pop("seed", 0), settings.get("optimizer", "Muon")
                yield (133_568, optimizer, data_parallel), f"{name} {settings}", seed, heldout_loss(row)
    for row in read("studies.jsonl"):
        settings = row["settings"] | row["varied"]
        if settings["train.steps"] in STEPS:
            optimizer = "Muon" if settings["preset"] == "tiny-muon" else "AdamW"
            key = STEPS[settings["train.steps"]], optimizer, settings.get("algorithm") == "data-parallel"
            yield key, str(settings), settings["seed"], heldout_loss(row)


def read(name: str) -> list[dict[str, Any]]:
    return list(map(json.loads, (HERE / name).read_text("utf-8").splitlines()))


def best() -> dict[Key, tuple[float, int]]:
    """Return the lowest mean of each key, among the settings with the most seeds, and their number."""
    losses: dict[Key, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for key, settings, seed, loss in runs():
        losses[key][settings][seed] = loss
    result = {}
    for key, settings_losses in losses.items():
        most = max(map(len, settings_losses.values()))
        means = [fmean(each.values()) for each in settings_losses.values() if len(each) == most]
        result[key] = min(means), most
    return result


def draw() -> None:
    matplotlib.rcParams |= {"svg.hashsalt": "gap", "svg.fonttype": "none", "font.family": "sans-serif"}
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for replicas, color in ((2, "tab:gray"), (4, "black")):
        for ends, style in (((1e5, FITTED[0]), ":"), (FITTED, "-")):
            label = f"AdamW, M = {replicas}, law of 2503.09799" if style == "-" else None
            axes.plot(ends, [law(replicas, parameters) for parameters in ends], style, color=color, label=label)
    gaps = [100 * (many / one - 1) for one, many in MULOCO.values()]
    axes.plot(list(MULOCO), gaps, "s", color="tab:orange", mfc="none", label="Muon, M = 16, MuLoCo (2505.23725)")
    losses = best()
    for optimizer, color in (("AdamW", "black"), ("Muon", "tab:orange")):
        for parameters in sorted({key[0] for key in losses if key[1] == optimizer}):
            (many, seeds), (one, _) = (losses[parameters, optimizer, each] for each in (False, True))
            gap = 100 * (many / one - 1)
            label = f"{optimizer}, M = 4, this package" if seeds > 1 else None
            axes.plot(parameters, gap, "o", color=color, mfc=color if seeds > 1 else "none", label=label)
            print(f"{parameters:>7,} {optimizer:5} {one:.4f} {many:.4f} {gap:+.2f} %, {seeds} seed(s)")
    axes.axhline(0, color="tab:gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="parameters", ylabel="loss above data-parallel training, %")
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(HERE / "gap.svg", metadata={"Date": None})


def law(replicas: int, parameters: float) -> float:
    """Return the gap of the fits, in per cent."""
    (one, slope), (many, other) = LAW[0], LAW[replicas]
    ratio: float = many / one * parameters ** (other - slope)
    return 100 * (ratio - 1)


if __name__ == "__main__":
    draw()
