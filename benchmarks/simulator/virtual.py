"""Training runs in one process on emulated links, and what `diloco plan` predicts for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from diloco.config import Configuration, compose, parse_arguments
from diloco.data import build_corpus
from diloco.model import build_model
from diloco.plan import IDEAL, Exchange, Site, simulate
from diloco.train import (
    Fleet,
    Session,
    make_fragments,
    make_links,
    make_transport,
    resolve,
)

__all__ = ["compare"]

MODEL = (
    "--model.arguments {layers=4,width=32,ffn_width=64,heads=2,vocab_size=257} --sequence-length 16 "
    "--batch-size 1 --data-parallel-steps 0 --optimizer.warmup-steps 2 --device cpu"
)

RUNS = (
    "--algorithm diloco --inner-steps 10 --replicas 2",
    "--algorithm diloco --inner-steps 30 --replicas 4 --codec fp4",
    "--algorithm streaming --inner-steps 10 --fragments 3 --overlap-steps 0 --replicas 2 --codec float32",
    "--algorithm streaming --inner-steps 10 --fragments 3 --overlap-steps 1 --replicas 2 --codec int8",
    "--algorithm streaming --inner-steps 20 --fragments 5 --overlap-steps 7 --replicas 3",
    "--algorithm streaming --inner-steps 20 --fragments 5 --overlap-steps 19 --replicas 8 --codec bfloat16",
)
"""The methods; each runs on each of the links."""

LINKS = (
    "--emulate.bandwidth 200kbit --emulate.latency 50ms --emulate.step-time 100ms",
    "--emulate.bandwidth 1Mbit --emulate.latency 300ms --emulate.step-time 100ms",
    "--emulate.bandwidth 20Mbit --emulate.latency 10ms --emulate.step-time 100ms",
)

STEPS = 95


def compare(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each method on each link; the training text is written to ``folder``."""
    torch.set_num_threads(1)  # the models are too small for more
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {number} of it. " * 4}) + "\n" for number in range(400)))
    for run in (f"{method} {link}" for method in RUNS for link in LINKS):
        given = compose(parse_arguments([*MODEL.split(), *run.split(), "--steps", str(STEPS), "--data", str(text)]))
        settings = resolve(given, num_layers=given.model.decoder.layers)
        yield {"kind": "virtual", "run": run, "measured": _train(settings), "predicted": _predict(settings)}


def _train(settings: Configuration) -> dict[str, float]:
    transport = make_transport(settings)
    fleet, corpus = Fleet(transport), build_corpus(settings.data)
    session = Session(settings, corpus, fleet, torch.device("cpu"), lambda event: None)
    for _ in range(STEPS):
        session.step()
    session.drain()
    network = transport.network
    assert network is not None, "the links are emulated"
    return {"compute_utilization": session.compute_utilization(), "wall_s": max(network.now_s)}


def _predict(settings: Configuration) -> dict[str, float]:
    model, replicas = build_model(settings.model.decoder, seed=0, device="meta"), settings.network.replicas
    sizes = [fragment.numel for fragment in make_fragments(settings, model)]
    exchange = Exchange.of(settings, sizes)
    times_s = settings.emulate.step_time[:1] * replicas
    site = Site(links=tuple(make_links(settings)), step_time_s=times_s, conditions=IDEAL)
    parcels = exchange.parcels(replicas, site.uplinks(exchange.schedule.transfer_steps))
    result = simulate(exchange.schedule, parcels, site, steps=STEPS)
    for fragment in tuple(result.in_flight):
        result.merge(fragment, STEPS)
    return {"compute_utilization": result.compute_utilization, "wall_s": result.wall_s}
