"""What SkyPilot, Slurm, containers and Kubernetes start, passed to the parsers that read it in production."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco.config import RunPlan, compose, parse_arguments, plan_run

ROOT = Path(__file__).parent.parent
SKYPILOT = sorted((ROOT / "launch" / "skypilot").glob("*.yaml"))
KUBERNETES = ROOT / "launch" / "kubernetes" / "train.yaml"


def started(script: str, folder: Path, **environment: str) -> list[str]:
    """Return the arguments with which a script calls `diloco`."""
    stub = folder / "venv" / "bin"
    stub.mkdir(parents=True)
    (stub / "activate").touch()
    for name, says in {"diloco": '"$@"', "curl": "203.0.113.7", "hostname": "10.0.0.5 fe80::1"}.items():
        (stub / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {says if name == "diloco" else repr(says)}\n')
        (stub / name).chmod(0o755)
    variables = {"PATH": f"{stub}:/usr/bin:/bin", "HOME": str(folder), **environment}
    done = subprocess.run(["bash", "-ec", script], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def planned(script: str, folder: Path, **environment: str) -> tuple[RunPlan, str | None]:
    """Return the plan of the run that a script begins, and what it resumes or begins."""
    command, *arguments = started(script, folder, **environment)
    assert command == "train"
    line = parse_arguments(arguments)
    compose(line)
    return plan_run(line), line.resume_or_start


@pytest.mark.parametrize("path", SKYPILOT, ids=lambda path: path.stem)
def test_skypilot_reads_its_files(path: Path) -> None:
    """Where it is installed: it has 317 MB, and is no dependency of the tests."""
    sky = pytest.importorskip("sky")
    task: dict[str, Any] = yaml.safe_load(path.read_text())
    needed = [(name, "x") for name, value in task["envs"].items() if value is None]
    parsed = sky.Task.from_yaml_config(dict(task), env_overrides=needed)
    assert (parsed.name, parsed.workdir) == (task["name"], task["workdir"])


@pytest.mark.parametrize(
    ("name", "variables", "network"),
    [
        ("one-site", {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}, ("tcp", 8, None, ())),
        ("two-regions", {"REPLICA": "0"}, ("tcp", 2, 0, ("10.0.0.5:29400",))),
        ("two-regions", {"REPLICA": "1", "JOIN": "10.0.0.9:29400"}, ("tcp", 2, 1, ("10.0.0.9:29400",))),
        ("swarm-spot", {"PEER": "3", "JOIN": "/dns/a/p2p/Qm"}, ("swarm", 1, None, ("/dns/a/p2p/Qm",))),
    ],
)  # fmt: skip
def test_skypilot_starts_what_diloco_understands(
    name: str, variables: dict[str, str], network: tuple[object, ...], tmp_path: Path
) -> None:
    task = yaml.safe_load((ROOT / "launch" / "skypilot" / f"{name}.yaml").read_text())
    given = {"MIRROR": "s3://bucket/mine", **variables}
    assert {key for key, value in task["envs"].items() if value is None} <= given.keys()
    for place in task.get("file_mounts", ()):
        tmp_path.joinpath(place.removeprefix("~/")).touch()
    plan, place = planned(task["run"], tmp_path, **{key: value or "" for key, value in task["envs"].items()} | given)
    is_peer = name == "swarm-spot"
    assert place == f"s3://bucket/mine{'/3' if is_peer else ''}"
    settings = plan.configuration
    asked = settings.network
    assert (asked.transport, asked.replicas, asked.replica, asked.join) == network
    assert settings.out == tmp_path / "run"
    assert asked.announce == (("203.0.113.7:31330",) if is_peer else ())
    assert asked.secret_file == (tmp_path / "diloco.secret" if is_peer else None)


def test_kubernetes_starts_what_diloco_understands(tmp_path: Path) -> None:
    settings, service, _, job = yaml.safe_load_all(KUBERNETES.read_text())
    (tmp_path / "run.toml").write_text(settings["data"]["run.toml"])
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (script,) = container["args"]
    plan, place = planned(script.replace("/config/", f"{tmp_path}/"), tmp_path, JOB_COMPLETION_INDEX="3")
    network, ports = plan.configuration.network, {each["name"]: each["containerPort"] for each in container["ports"]}
    assert place == "/runs/run"
    assert (network.replicas, network.replica) == (job["spec"]["completions"], 3)
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert network.rendezvous == f"{host}:{ports['rendezvous']}"
    assert plan.configuration.monitor.metrics_address() == ("0.0.0.0", ports["metrics"] - 3)
    mounts, volumes = (
        {each["name"]: each for each in part} for part in (container["volumeMounts"], pod["spec"]["volumes"])
    )
    assert str(network.secret_file.parent) == mounts["secret"]["mountPath"]
    assert volumes["secret"]["secret"]["defaultMode"] == 0o440, "no other user can read it"
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])


@pytest.mark.parametrize("version", ["1.31", "1.32", "1.33", "1.34", "1.35"])
def test_kubernetes_accepts_its_manifest(version: str) -> None:
    """By its schema, where ``kubernetes-validate`` is installed."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in yaml.safe_load_all(KUBERNETES.read_text()):
        validate(document, version, strict=True)


def test_container_copies_files_that_exist_and_installs_extras_that_exist() -> None:
    text = (ROOT / "launch" / "container" / "Containerfile").read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    words = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    copied = [path for line in words if line[0] == "COPY" for path in line[1:-1]]
    assert {"src", "pyproject.toml"} <= set(copied) <= allowed
    assert all((ROOT / path).exists() for path in copied)
    (extras,) = [line[1].removeprefix("EXTRAS=") for line in words if line[1].startswith("EXTRAS=")]
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
