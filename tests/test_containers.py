"""Container file and Kubernetes manifests: the files that they name exist, and their commands are valid.

No image is built and no cluster is used. The commands are checked by the parsers that parse them in production.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from diloco.cli import MISUSED, dht
from diloco.config import RunPlan, parse_arguments, plan_run

ROOT = Path(__file__).parent.parent
CONTAINER = ROOT / "launch" / "container" / "Containerfile"
BEGIN = ROOT / "launch" / "container" / "start-or-resume"
GIVEN = {"diloco", "corpus"}
"""The secret and the volume claim that the user creates as described in docs/launching.md."""


def instructions() -> list[tuple[str, list[str]]]:
    """Return the instructions of the container file with their arguments."""
    text = re.sub(r"^#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], shlex.split(line)[1:]) for line in text.splitlines() if line.strip()]


def of(kind: str) -> list[list[str]]:
    return [words for name, words in instructions() if name == kind]


def test_what_is_copied_exists_and_is_let_through() -> None:
    stages = {words[-1] for words in of("FROM") if "AS" in words}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for words in of("COPY"):
        paths = [word for word in words if not word.startswith("--")][:-1]
        if stage := [word.removeprefix("--from=") for word in words if word.startswith("--from=")]:
            assert stage[0] in stages
            continue
        for path in paths:
            assert (ROOT / path).exists()
            assert path in let_through


def test_packages_are_installed_as_the_makefile_does() -> None:
    """Both use constraints, install torch first, and disable build isolation. All extras exist in the project."""
    project = (ROOT / "pyproject.toml").read_text()
    pip = [words for words in of("RUN") if words[:4] == ["python", "-m", "pip", "install"]]
    lines = (ROOT / "Makefile").read_text().splitlines()
    made = [line.split("pip install ")[1] for line in lines if "pip inst" in line]
    noise = {"--quiet", "--disable-pip-version-check", "--editable", "--extra-index-url", "${TORCH_INDEX}"}
    ours, theirs = ([[w for w in words if w not in noise] for words in each] for each in (
        [words[4:] for words in pip], [shlex.split(line) for line in made]
    ))  # fmt: skip
    assert ours[0] == theirs[0]
    assert ours[1][:-1] == theirs[1][:-1]
    assert (ours[1][-1], theirs[1][-1]) == (".[${EXTRAS}]", ".[watch]")
    (extras,) = (words[0].removeprefix("EXTRAS=") for words in of("ARG") if words[0].startswith("EXTRAS="))
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


def test_the_image_is_for_nobody_special_and_its_checks_are_python() -> None:
    assert of("USER") == [["1000:1000"]]
    (code,) = (words[2] for words in of("RUN") if words[:2] == ["python", "-c"])
    exec(code.partition(";")[0])
    assert "available()" in code


def expanded(container: dict[str, Any], maps: dict[str, dict[str, str]]) -> list[str]:
    """Return the arguments of a container with the variables expanded as in the cluster."""
    values = {"JOB_COMPLETION_INDEX": "3"}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        if key := source.get("configMapKeyRef"):
            values[entry["name"]] = maps[key["name"]][key["key"]]
        else:
            values[entry["name"]] = entry.get("value", "3")
    return [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in container["args"]]


def begun(arguments: list[str], folder: Path, *, own_out: str = "0") -> list[str]:
    """Return the arguments with which `start-or-resume` calls `diloco`."""
    (folder / "diloco").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "diloco").chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "OWN_OUT": own_out}
    done = subprocess.run(["sh", BEGIN, *arguments], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def planned(arguments: list[str]) -> RunPlan:
    assert arguments[0] == "train"
    return plan_run(parse_arguments(arguments[1:]))


@pytest.mark.parametrize("name", ["swarm.yaml", "fixed.yaml"])
def test_every_container_is_given_what_it_understands(name: str, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all((ROOT / "launch" / "kubernetes" / name).read_text()))
    made = {(document["kind"], document["metadata"]["name"]) for document in documents}
    maps = {document["metadata"]["name"]: document["data"] for document in documents if document["kind"] == "ConfigMap"}
    ports: dict[str, set[int]] = {}
    for document in documents:
        if document["kind"] not in ("Job", "Deployment"):
            continue
        template = document["spec"]["template"]
        pod, labels = template["spec"], template["metadata"]["labels"]
        for volume in pod["volumes"]:
            for kind, field, given in (
                ("ConfigMap", "configMap", "name"),
                ("Secret", "secret", "secretName"),
                ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
            ):
                if field in volume:
                    assert (kind, volume[field][given]) in made or volume[field][given] in GIVEN
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["image"] in ("diloco:latest", "diloco:cuda")
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        names = {port["name"]: port["containerPort"] for port in container["ports"]}
        ports[labels["app"]] = set(names.values())
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                assert container[probe]["tcpSocket"]["port"] in names
        arguments = expanded(container, maps)
        paths = [word.rpartition("=")[2] for word in arguments if word.rpartition("=")[2].startswith("/")]
        places = [mount["mountPath"] for mount in [*container.get("volumeMounts", []), {"mountPath": "/identity"}]]
        for path in paths:
            assert path.startswith(("/ip4/", "/dns4/", *places)), f"nothing is mounted for {path}"
        if arguments[:2] == ["diloco", "dht"]:
            options = tyro.cli(dht.DhtOptions, args=arguments[2:])
            assert options.listen == tuple(f"/ip4/0.0.0.0/tcp/{port}" for port in names.values())
            continue
        (tmp_path / "run.toml").write_text(next(iter(maps.values()))["run.toml"])
        local = [
            word.replace("/runs", str(tmp_path)).replace("/config/run.toml", str(tmp_path / "run.toml"))
            for word in arguments
        ]
        assert local[0] == BEGIN.name
        settings = planned(begun(local[1:], tmp_path)).configuration
        listening = {f"/ip4/0.0.0.0/tcp/{port}" for port in names.values()}
        if settings.network.transport == "hivemind":
            assert set(settings.network.listen) == listening
            assert settings.network.replicas == document["spec"]["completions"]
            host = re.match(r"/dns4/([\w-]+)/tcp/(\d+)/p2p/", settings.network.join[0])
            assert host
            assert ("Service", host[1]) in made
            assert int(host[2]) in ports[host[1]]
        else:
            assert settings.network.replicas == document["spec"]["completions"]
            assert settings.network.replica == 3
            first = f"{document['metadata']['name']}-0.{pod['subdomain']}:"
            assert settings.network.join == first + str(*names.values())
            assert ("Service", pod["subdomain"]) in made
        (refused,) = (r for r in document["spec"]["podFailurePolicy"]["rules"] if r["action"] == "FailJob")
        assert refused["onExitCodes"]["values"] == [MISUSED]
        assert refused["onExitCodes"]["containerName"] == container["name"]
    selectors = [document["spec"]["selector"]["app"] for document in documents if document["kind"] == "Service"]
    assert set(selectors) <= set(ports)


def test_a_command_that_is_repeated_begins_once_and_then_goes_on(tmp_path: Path) -> None:
    """A folder without a checkpoint is renamed only if no other replica writes to it (OWN_OUT=1)."""
    out = tmp_path / "run"
    assert begun([str(out), "run.toml", "--steps", "5"], tmp_path) == [
        *("train", "run.toml", "--steps", "5", "--out"),
        str(out),
    ]
    assert begun([str(out)], tmp_path) == ["train", "--out", str(out)]
    out.mkdir()
    begun([str(out)], tmp_path)
    assert out.exists()
    begun([str(out)], tmp_path, own_out="1")
    assert not out.exists()
    assert len(list(tmp_path.glob("run.*"))) == 1
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "latest").write_text("step-00000005\n")
    for given in (["run.toml", "--steps", "5"], ["--steps", "5"]):
        assert begun([str(out), *given], tmp_path, own_out="1") == ["train", "--resume", str(out), "--steps", "5"]
    assert begun([str(out), "run.toml"], tmp_path) == ["train", "--resume", str(out)]
    assert begun([str(out)], tmp_path) == ["train", "--resume", str(out)]
