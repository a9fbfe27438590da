"""`diloco train --transport torch` as a user types it: real processes, compared with the run in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import main
from tests.processes import free_port
from tests.runs import SMALL

LIMIT_S = 300
"""Far more than any of these takes, for machines that are busy."""


def command(data: Path, out: Path, arguments: str) -> list[str]:
    words = ["train", *SMALL.split(), str(data), "--out", str(out), "--monitor.console", "quiet", *arguments.split()]
    return [sys.executable, "-m", "diloco", *words]


def quiet_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def run(data: Path, out: Path, arguments: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        command(data, out, arguments),
        env=quiet_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return dict(json.loads((out / "summary.json").read_text())) if code == 0 else {"stderr": done.stderr}


START = "--data-parallel-steps 3 --train.threads 1"


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run in one process."""
    return run(data, tmp_path_factory.mktemp("alone") / "run", START)


def test_processes_that_stop_and_go_on_end_where_one_process_does(
    data: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """Through a shared start, fragments in flight at the stop, and an average of fp4."""
    out = tmp_path / "run"
    run(data, out, f"{START} --transport torch --stop-after 9")
    assert (out / "replica-1" / "checkpoints" / "latest").read_text() == "step-00000009\n"
    resumed = [sys.executable, "-m", "diloco", "train", "--resume", str(out), "--monitor.console", "quiet"]
    subprocess.run(resumed, env=quiet_environment(), check=True, timeout=LIMIT_S, capture_output=True)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (out, out / "replica-1")]
    for summary in summaries:
        assert summary["global_params_digest"] == alone["global_params_digest"]
        assert summary["rounds_committed"] == alone["rounds_committed"]
        assert summary["sent_bytes_per_replica"] == alone["sent_bytes_per_replica"]
    assert summaries[0]["heldout_loss"] == alone["heldout_loss"]


@pytest.mark.parametrize("parallelism", ["fsdp", "ddp"])
def test_two_replicas_of_two_ranks_are_two_replicas(
    data: Path, tmp_path: Path, alone: dict[str, Any], parallelism: str
) -> None:
    """To round-off: the ranks sum gradients in another order. What they trained can be evaluated like any run."""
    out = tmp_path / "run"
    summary = run(data, out, f"{START} --transport torch --replica-size 2 --train.parallelism {parallelism}")
    assert summary["heldout_loss"] == pytest.approx(alone["heldout_loss"], rel=1e-3)
    assert summary["rounds_committed"] == alone["rounds_committed"]
    assert main(["evaluate", str(out)]) == 0


def test_settings_that_differ_are_refused_by_both_in_one_sentence(data: Path, tmp_path: Path) -> None:
    """Two processes started by hand, one of them with another codec; nothing of either stays behind."""
    out = tmp_path / "run"
    by_hand = "--transport torch --rendezvous 127.0.0.1:{port} --replica {replica} --codec {codec}"
    port = free_port()
    processes = [
        subprocess.Popen(
            command(data, out, by_hand.format(port=port, replica=replica, codec=codec)),
            env=quiet_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for replica, codec in enumerate(("fp4", "int8"))
    ]
    for process in processes:
        _, words = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert "has codec = fp4 (block_size 256) and replica 1" in words
        assert "has codec = int8 (block_size 256); the same on both sides would work" in words
    assert not [path for path in out.rglob("*") if path.is_file()]


def test_a_signal_to_one_stops_all_at_one_step_and_saves(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        command(data, out, f"{START} --transport torch --steps 100000"),
        env=quiet_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and '"RoundCommitted"' in metrics.read_text()):
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, words
    steps = {(folder / "checkpoints" / "latest").read_text() for folder in (out, out / "replica-1")}
    assert len(steps) == 1
