"""What containers and the Kubernetes job start, passed to the parsers that read it in production."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from diloco.config import parse_arguments, plan_run

ROOT = Path(__file__).parent.parent
START = ROOT / "launch" / "container" / "start-or-resume"


def started(arguments: list[str], folder: Path) -> list[str]:
    """Return the arguments with which `start-or-resume` calls `diloco`."""
    (folder / "diloco").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "diloco").chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["sh", START, *arguments], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_repeated_command_starts_once_and_then_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert started([str(out), "run.toml", "--steps", "5"], tmp_path) == [
        *("train", "run.toml", "--steps", "5", "--out", str(out))
    ]
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "latest").write_text("step-00000005\n")
    for given in (["run.toml", "--steps", "5"], ["--steps", "5"]):
        assert started([str(out), *given], tmp_path) == ["train", "--resume", str(out), "--steps", "5"]


def test_kubernetes_job_gets_settings_and_arguments_that_it_understands(tmp_path: Path) -> None:
    settings, service, _, job = yaml.safe_load_all((ROOT / "launch" / "kubernetes" / "train.yaml").read_text())
    (tmp_path / "run.toml").write_text(settings["data"]["run.toml"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = [
        word.replace("$(JOB_COMPLETION_INDEX)", "3").replace("/config/", f"{tmp_path}/") for word in container["args"]
    ]
    assert words[0] == START.name
    plan = plan_run(parse_arguments(started([str(tmp_path / "run"), *words[2:]], tmp_path)[1:]))
    network = plan.configuration.network
    assert (network.replicas, network.replica) == (job["spec"]["completions"], 3)
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert network.rendezvous == f"{host}:{container['ports'][0]['containerPort']}"


def test_container_copies_files_that_exist_and_installs_extras_that_exist() -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / "launch" / "container" / "Containerfile").read_text(), flags=re.MULTILINE)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if words[:1] == ["COPY"] and "--from=build" not in words:
            for path in (word for word in words[1:-1] if not word.startswith("--")):
                assert (ROOT / path).exists()
                assert path in allowed
        if words[:1] == ["ARG"] and words[1].startswith("EXTRAS="):
            project = (ROOT / "pyproject.toml").read_text()
            assert all(f"\n{extra} = [" in project for extra in words[1].removeprefix("EXTRAS=").split(","))


@pytest.mark.parametrize("script", sorted((ROOT / "launch").rglob("*.sbatch")), ids=lambda path: path.name)
def test_batch_script_is_valid_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
