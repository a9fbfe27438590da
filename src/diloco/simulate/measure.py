"""Measurements for a plan: the time of an inner step on this machine, and the links to other machines."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diloco.algorithm import SyncSchedule
from diloco.errors import ConfigurationError, TransportError
from diloco.model import build_language_model
from diloco.outer import DiLoCo
from diloco.train import InnerLoop, ParallelModel, RunSettings, inner_learning_rate, make_inner_optimizer, prepare_model
from diloco.transport import Link, examine, parse_address

__all__ = ["MeasuredStep", "measure_links", "measure_step", "synchronisation_s"]

_STEPS, _AT_MOST_S = 5, 60.0  # number of inner steps to time, and the time after which no further one starts
_ROUNDS = 5
_LINK_BYTES, _LINK_TIMEOUT_S = 10_000_000, 10.0  # bytes to transfer in each direction, time-out of each step


@dataclass(frozen=True)
class MeasuredStep:
    """The time of inner steps, and the work of a synchronisation."""

    median_s: float  # median time of the timed steps
    spread: float  # longest time over shortest time
    steps: int  # number of timed steps
    send_s_per_value: float  # pseudo-gradient and its encoding in fp4
    merge_s_per_value: float  # mean of one payload, outer step and merge
    device: str  # the device that was timed


def measure_step(settings: RunSettings, device: torch.device) -> MeasuredStep:
    """Time inner steps of the model of ``settings`` on random tokens, and sends and merges of the whole model.

    A step is forward and backward pass, clipping and optimizer. With gradient accumulation, one piece of the batch is
    timed and multiplied by the number of pieces. The first step is a warm-up. At least one step is timed; after that,
    no step starts once a minute has passed.

    Args:
        settings: resolved settings with a known vocabulary size.

    Raises:
        ConfigurationError: if the model does not fit on the device.
    """
    train = settings.train
    rows = train.batch_size // train.gradient_accumulation
    taken_s: list[float] = []
    try:
        model = build_language_model(settings.model.settings, seed=0, device=device)
        prepare_model(model, train)
        shape = rows, train.sequence_length + 1
        tokens = torch.randint(model.vocab_size, shape, dtype=torch.int64, device=device)
        inner = InnerLoop(
            ParallelModel(model),
            make_inner_optimizer(settings.optimizer, model),
            learning_rate=inner_learning_rate(settings.optimizer, train.steps),
            clip_norm=settings.optimizer.clip_norm,
            precision=train.precision,
        )
        began_s = time.perf_counter()
        while len(taken_s) <= _STEPS and (len(taken_s) < 2 or time.perf_counter() - began_s < _AT_MOST_S):
            started_s = time.perf_counter()
            # reading the loss here, and the norm in `apply`, waits for the device
            float(inner.accumulate_gradients(tokens[:, :-1], tokens[:, 1:]))
            piece_s = time.perf_counter() - started_s
            inner.unscale()
            inner.apply(len(taken_s))
            _settle(device)
            apply_s = time.perf_counter() - started_s - piece_s
            taken_s.append(train.gradient_accumulation * piece_s + apply_s)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the model with {rows} sequences at once does not fit in the memory of {device}: "
            f"{str(error).splitlines()[0]} Use more gradient accumulation or a smaller model."
        ) from error
    timed = taken_s[1:]
    send_s, merge_s = synchronisation_s(model, inner.optimizer, device)
    values = model.num_parameters()
    spread = max(timed) / min(timed)
    return MeasuredStep(statistics.median(timed), spread, len(timed), send_s / values, merge_s / values, str(device))


def synchronisation_s(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, codec: str = "fp4"
) -> tuple[float, float]:
    """Return the median time of five sends and of five merges of the whole ``model`` by a lone replica, in seconds."""
    diloco = DiLoCo(model, optimizer, schedule=SyncSchedule(inner_steps=1), codec=codec)
    sends_s, merges_s = [], []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        diloco.begin()
        _settle(device)
        sent_s = time.perf_counter()
        diloco.finish()
        _settle(device)
        sends_s.append(sent_s - started_s)
        merges_s.append(time.perf_counter() - sent_s)
    return statistics.median(sends_s), statistics.median(merges_s)


def _settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_links(peers: Sequence[str]) -> list[Link]:
    """Measure the link to each peer in turn: half the round-trip time, and the slower of the two directions.

    Args:
        peers: addresses at which replicas or `diloco doctor --listen` answer.

    Raises:
        TransportError: if the connection to a peer does not work, with the reason.
    """
    links = []
    for peer in peers:
        found = asyncio.run(examine(parse_address(peer, key="the peer"), _LINK_BYTES, _LINK_TIMEOUT_S))
        rates = (found.up_bits_per_s, found.down_bits_per_s)
        if not found.ok or found.latency_s is None or rates[0] is None or rates[1] is None:
            raise TransportError(f"{peer}: {found.problem}; {found.advice}. Nothing was planned.")
        links.append(Link(min(rates[0], rates[1]), found.latency_s / 2))
    return links
