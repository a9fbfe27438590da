"""Measurements for a plan: the time of an inner step on this machine, and the work of a synchronisation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from diloco.algorithm import SyncSchedule
from diloco.devices import use_device
from diloco.errors import ConfigurationError
from diloco.model import build_language_model
from diloco.outer import DiLoCo
from diloco.train import InnerLoop, ParallelModel, RunSettings, inner_learning_rate, make_inner_optimizer, prepare_model

_STEPS, _AT_MOST_S = 5, 60.0  # number of inner steps to time, and the time after which no further one starts
_ROUNDS = 5  # number of sends and merges


def measure_step(settings: RunSettings) -> tuple[float, float, float]:
    """Time inner steps of the model of ``settings`` on random tokens, and sends and merges of the whole model.

    A step is forward and backward pass, clipping and optimizer. With gradient accumulation, one piece of the batch is
    timed and multiplied by the number of pieces. The first step is a warm-up. At least one step is timed; after that,
    no step starts once a minute has passed.

    Args:
        settings: resolved settings with a known vocabulary size.

    Returns:
        The median time of a step, and the times per value of a send (pseudo-gradient and its encoding in fp4) and of a
        merge (mean of one payload, outer step and merge), in seconds.

    Raises:
        ConfigurationError: if the model does not fit on the device.
    """
    train, device = settings.train, use_device(settings.train.device)
    rows = train.batch_size // train.gradient_accumulation
    taken_s: list[float] = []
    try:
        model = build_language_model(settings.model, seed=0, device=device)
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
            piece_s = _timed(lambda: float(inner.accumulate_gradients(tokens[:, :-1], tokens[:, 1:])), device)
            apply_s = _timed(inner.unscale, device) + _timed(lambda: inner.apply(len(taken_s)), device)
            taken_s.append(train.gradient_accumulation * piece_s + apply_s)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the model with {rows} sequences at once does not fit in the memory of {device}: "
            f"{str(error).splitlines()[0]} Use more gradient accumulation or a smaller model."
        ) from error
    diloco = DiLoCo(model, inner.optimizer, schedule=SyncSchedule(inner_steps=1), codec="fp4")
    rounds = [(_timed(diloco.begin, device), _timed(diloco.finish, device)) for _ in range(_ROUNDS)]
    send_s, merge_s = map(statistics.median, zip(*rounds, strict=True))
    values = model.num_trained()
    return statistics.median(taken_s[1:]), send_s / values, merge_s / values


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Return how many seconds ``action`` keeps the device busy."""
    started_s = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
