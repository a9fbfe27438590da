"""Runs of models from a source, started as `diloco train` starts them, and sessions without a run."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.config import RunPlan, plan_run
from diloco.data import build_corpus
from diloco.events import Event
from diloco.model import with_vocabulary
from diloco.train import Fleet, MetFleet, MetSession, Session, make_transport, run_training
from tests.command_lines import command_line
from tests.runs import Listener, settings_of

BASE: dict[str, Any] = {
    "train__device": "cpu",
    "train__steps": 12,
    "train__sequence_length": 16,
    "train__batch_size": 2,
    "train__data_parallel_steps": 0,
    "optimizer__warmup_steps": 2,
    "sync__inner_steps": 4,
    "network__replicas": 2,
    "evaluation__every_steps": 0,
    "evaluation__sequences": 4,
    "checkpoint__every_steps": 0,
}


def trained(out: Path, plan: RunPlan) -> dict[str, Any]:
    return dict(run_training(plan.configuration, folder=out, sink=Listener(), config_toml=plan.record))


def plan_of(source: Path | str, data: Path, **values: Any) -> RunPlan:
    return plan_run(command_line(**(BASE | {"model__source": str(source), "data__paths": (str(data),)} | values)))


def session_of(
    data: Path,
    arguments: str = "",
    fleet: Fleet | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    initial: Mapping[str, Tensor] | None = None,
) -> Session:
    """Return a new session with the settings of `SMALL` and more arguments."""
    settings = settings_of(data, arguments)
    corpus = build_corpus(settings.data)
    settings = replace(settings, model=with_vocabulary(settings.model, corpus.tokenizer.vocab_size))
    fleet = fleet or Fleet(make_transport(settings).endpoints)
    kind = MetSession if isinstance(fleet, MetFleet) else Session
    return kind(settings, corpus, fleet, torch.device("cpu"), on_event, initial)
