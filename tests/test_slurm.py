"""The batch script, run by bash with emulated Slurm commands and real training."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.config import parse_arguments
from tests.processes import Processes
from tests.runs import SMALL, write_text
from tests.slurm import LIMIT_S, Slurm

SCRIPT = Path(__file__).parent.parent / "launch" / "slurm" / "train.sbatch"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with Processes() as processes:
        slurm = Slurm(tmp_path, processes)
        yield slurm
        slurm.close()


def ended(job: subprocess.Popen[str], code: int = 0) -> str:
    words, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == code, words
    return words


def test_a_job_at_its_time_limit_saves_is_requeued_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """Two replicas train over the loopback. The second job finds the checkpoints of the first and resumes the run."""
    small = SMALL.replace("--replicas 2", "").replace("--steps 12", "").removesuffix("--data")
    (tmp_path / "run.toml").write_text(f'[data]\npaths = ["{write_text(tmp_path)}"]\n')
    flags = [*small.split(), "--monitor.no-tensorboard", "--train.threads", "1", "--steps", "100000"]
    out = tmp_path / "runs" / "diloco-4711"

    job = slurm.submit(SCRIPT, "run.toml", *flags)
    tasks = slurm.tasks()
    slurm.wait_for(out / "metrics.jsonl", '"RoundCommitted"', tasks)
    job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@300 does
    slurm.forward_sigterm(tasks)
    assert slurm.end(tasks) == [130, 130]
    words = ended(job)
    assert "2 replicas of 0 GPUs, rendezvous 127.0.0.1:24711" in words
    assert "saved; it resumes from" in words
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    steps = {(folder / "checkpoints" / "latest").read_text() for folder in (out, out / "replica-1")}
    (step,) = (int(text.removeprefix("step-")) for text in steps)

    job = slurm.submit(SCRIPT, "run.toml", *flags, "--stop-after", str(step + 5), SLURM_RESTART_COUNT="1")
    tasks = slurm.tasks()
    assert all("--resume" in task.arguments and "run.toml" not in task.arguments for task in tasks)
    assert slurm.end(tasks) == [0, 0]
    ended(job)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (out, out / "replica-1")]
    assert [summary["steps"] for summary in summaries] == [step + 5, step + 5]
    assert len({summary["global_params_digest"] for summary in summaries}) == 1
    assert (tmp_path / "scontrol").read_text().count("requeue") == 1


def test_a_job_that_was_killed_before_it_saved_begins_anew_and_loses_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """The old folder is renamed. An invalid setting ends the job with the exit code of the command."""
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "metrics.jsonl").write_text("half")
    job = slurm.submit(SCRIPT, "--codec", "zip", OUT="lost", SLURM_RESTART_COUNT="1")
    tasks = slurm.tasks()
    assert all(task.arguments[-7:-4] != ["--resume", "lost"] for task in tasks)
    assert slurm.end(tasks) == [2, 2]
    ended(job, 2)
    assert (tmp_path / "lost.attempt-0" / "metrics.jsonl").read_text() == "half"
    assert not (tmp_path / "scontrol").exists()


def test_a_replica_on_the_gpus_of_a_node_is_started_by_torchrun(slurm: Slurm, tmp_path: Path) -> None:
    """The parser of torchrun accepts its flags, and the parser of `diloco` accepts the rest."""
    from torch.distributed.run import get_args_parser

    (tmp_path / "tools" / "torchrun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"$JOB/torchrun"\nexit 3\n')
    (tmp_path / "tools" / "torchrun").chmod(0o755)
    ended(slurm.submit(SCRIPT, "run.toml", "--steps", "5", SLURM_GPUS_ON_NODE="8"), 3)
    given = get_args_parser().parse_args((tmp_path / "torchrun").read_text().splitlines())
    assert (given.nnodes, given.nproc_per_node, given.rdzv_endpoint) == ("2", "8", "127.0.0.1:24711")
    assert (given.module, given.training_script) == (True, "diloco")
    command, *arguments = given.training_script_args
    line = parse_arguments(arguments)
    assert (command, line.file) == ("train", Path("run.toml"))
    assert line.values == {
        "out": Path("runs/diloco-4711"),
        "network.transport": "torch",
        "network.replicas": 2,
        "network.replica_size": 8,
        "train.steps": 5,
    }
    assert (tmp_path / "srun").read_text().startswith("--kill-on-bad-exit=0 torchrun ")


def test_a_step_that_ends_before_the_script_waits_for_it_still_ends_the_job_with_its_code(
    slurm: Slurm, tmp_path: Path
) -> None:
    """The `kill -0` of the script is replaced by one that returns only when the step has ended."""
    (tmp_path / "tools" / "srun").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "early").write_text(
        'kill() { until [[ $1 != -0 ]] || ! builtin kill "$@" 2>/dev/null; do :; done; builtin kill "$@"; }\n'
    )
    ended(slurm.submit(SCRIPT, BASH_ENV=str(tmp_path / "early")), 3)


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "1"}, 1),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "h100:1"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "1"}, 2),
    ],
)
def test_gpus_are_shared_out_among_the_replicas(
    slurm: Slurm, tmp_path: Path, environment: dict[str, str], gpus: int
) -> None:
    for name in ("python", "torchrun"):
        (tmp_path / "tools" / name).write_text("#!/bin/sh\n")
        (tmp_path / "tools" / name).chmod(0o755)
    assert f"2 replicas of {gpus} GPUs" in ended(slurm.submit(SCRIPT, **environment))
    assert ("torchrun" in (tmp_path / "srun").read_text()) == (gpus > 1)
