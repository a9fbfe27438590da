"""Training runs in one process on emulated links, and their predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diloco.config import Configuration, load_configuration
from diloco.data import build_corpus
from diloco.model import build_model
from diloco.simulate import Cluster, outer_traffic, simulate
from diloco.train import (
    InProcessFleet,
    Session,
    make_configured_codec,
    make_fragments,
    make_links,
    make_schedule,
    make_transport,
    resolve,
)

__all__ = ["compare"]

MODEL = (
    "--model.arguments.layers 4 --model.arguments.width 32 --model.arguments.ffn-width 64 --model.arguments.heads 2 --train.sequence-length 16 "
    "--train.batch-size 1 --data-parallel-steps 0 --optimizer.warmup-steps 2 --train.device cpu --train.threads 1"
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
    "--emulate.bandwidth 2e5 --emulate.latency 0.05 --emulate.step-time 0.1",
    "--emulate.bandwidth 1e6 --emulate.latency 0.3 --emulate.step-time 0.1",
    "--emulate.bandwidth 2e7 --emulate.latency 0.01 --emulate.step-time 0.1",
)

STEPS = 95


def compare(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each method on each link; the training text is written to ``folder``."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"line {number} of it. " * 4}) + "\n" for number in range(400)))
    for method in RUNS:
        for link in LINKS:
            yield _row(f"{method} {link}", text)


def _row(arguments: str, text: Path) -> dict[str, Any]:
    given = load_configuration([*MODEL.split(), *arguments.split(), "--steps", str(STEPS), "--data", str(text)])
    settings = resolve(given, num_layers=given.model.layers)
    measured = _train(settings)
    predicted = _predict(settings)
    return {"run": arguments, "measured": measured, "predicted": predicted}


def _train(settings: Configuration) -> dict[str, float]:
    corpus = build_corpus(settings.data)
    settings = _with_vocabulary(settings, corpus.tokenizer.vocab_size)
    transport = make_transport(settings.transport)
    session = Session(settings, corpus, InProcessFleet(transport), torch.device("cpu"), lambda event: None)
    for _ in range(STEPS):
        session.step()
    session.drain()
    network = transport.rounds.network
    assert network is not None, "the links are emulated"
    return {"compute_utilization": session.compute_utilization(), "wall_s": max(network.now_s)}


def _predict(settings: Configuration) -> dict[str, float]:
    settings = _with_vocabulary(settings, 257)
    model = build_model(settings.model, seed=0, device="meta")
    sizes = [fragment.numel for fragment in make_fragments(settings.fragments, model)]
    codec = make_configured_codec(settings.codec)
    transport = settings.transport
    traffic = outer_traffic(make_schedule(settings), sizes, [codec], transport.replicas)
    cluster = Cluster.of(make_links(transport), transport.step_time_s[0])
    result = simulate(traffic, cluster, steps=STEPS, drain=True)
    return {"compute_utilization": float(result.compute_utilization), "wall_s": float(result.wall_s)}


def _with_vocabulary(settings: Configuration, vocab_size: int) -> Configuration:
    return replace(settings, model=replace(settings.model, vocab_size=vocab_size))
