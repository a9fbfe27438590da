"""Runs of models from a source, started as `diloco train` starts them."""

from pathlib import Path
from typing import Any

from diloco.config import RunPlan, plan_run
from diloco.train import run_training
from tests.command_lines import command_line
from tests.runs import Listener

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


def trained(out: Path, plan: RunPlan, sink: Listener | None = None) -> dict[str, Any]:
    return dict(run_training(plan.configuration, folder=out, sink=sink or Listener(), config_toml=plan.record))


def plan_of(source: Path | str, data: Path, **values: Any) -> RunPlan:
    return plan_run(command_line(**(BASE | {"model__source": str(source), "data__paths": (str(data),)} | values)))
