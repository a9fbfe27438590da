"""Weights & Biases without a network: offline files, and a server that can't be reached."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco import events
from diloco.cli import main
from diloco.cli.train_processes import monitor_settings
from diloco.config import load_configuration
from diloco.errors import ConfigurationError
from diloco.monitor import MonitorSettings, Sinks, WandbSettings, WandbSink, make_sinks, run_id
from diloco.train import Role
from tests.monitor.made_events import evaluated, started, step
from tests.runs import SMALL, write_text


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use no API key, no server and none of wandb's measurements of the machine."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for name in ("WANDB_X_DISABLE_STATS", "WANDB_X_DISABLE_META", "WANDB_DISABLE_GIT"):
        monkeypatch.setenv(name, "true")


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[None]:
    """End wandb's own process after these tests."""
    yield
    end_service()


def end_service() -> None:
    """End wandb's own process, which otherwise writes a run's last records some time after the run."""
    import wandb

    wandb.teardown()


def sent(folder: Path) -> list[dict[str, Any]]:
    """Read wandb's records in the run folder: LevelDB's log format, 32 KiB blocks with fragments of records."""
    from google.protobuf.json_format import MessageToDict
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, place, whole = path.read_bytes(), 7, b""  # after ":W&B", a magic number and a version
        while place + 7 <= len(data):
            left = 32_768 - place % 32_768
            if left < 7:
                place += left
                continue
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record or its last fragment
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                records.append(MessageToDict(record, preserving_proto_field_name=True))
                whole = b""
    return records


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the curves, without the fields that wandb adds."""
    rows = []
    for record in records:
        if "history" in record:
            items = record["history"]["item"]
            row = {
                "/".join(item.get("nested_key", [])) or item["key"]: json.loads(item["value_json"]) for item in items
            }
            rows.append({key: value for key, value in row.items() if key == "_step" or not key.startswith("_")})
    return rows


def exit_codes(records: list[dict[str, Any]]) -> list[int]:
    return [record["exit"].get("exit_code", 0) for record in records if "exit" in record]


def test_a_run_and_its_continuation_are_one_run_offline(tmp_path: Path) -> None:
    """Settings, group, curves, evaluations, samples and summary; the resumed part has the identifier of the first."""
    folder = tmp_path / "run"
    settings = WandbSettings(mode="offline", project="p", tags=("t",), name="run-replica-1", group="run")
    config = {"train": {"steps": 9}, "data": {"paths": (Path("a"),)}}
    for first in (0, 3):
        sink = WandbSink(settings, folder, every_steps=2, config=config)
        sink.handle(started(first))
        for number in range(first + 1, first + 4):
            sink.handle(step(number, loss=10.0 - number))
        sink.handle(evaluated(first + 3, 3.5))
        sink.handle(events.SampleGenerated(step=first + 3, prompt="def ", text="<b>"))
        sink.handle(events.RunFinished(step=first + 3, summary={"heldout_loss": 3.5, "interrupted": None}))
        sink.close()
        end_service()
    records = sent(folder)
    runs = [record["run"] for record in records if "run" in record]
    assert {run["run_id"] for run in runs} == {run_id(folder)}
    assert {(run["project"], run["run_group"], run["display_name"]) for run in runs} == {("p", "run", "run-replica-1")}
    assert runs[0]["tags"] == ["t"]
    configs = {item["key"]: json.loads(item["value_json"]) for item in runs[0]["config"]["update"]}
    assert configs["train"] == {"steps": 9}
    assert configs["data"] == {"paths": ["a"]}
    assert configs["run"] == {"num_replicas": 2, "parameters": 7, "tokens_per_step": 8}
    rows = history(records)
    losses = [(row["_step"], row["loss/train(nats)"]) for row in rows if "loss/train(nats)" in row]
    assert losses == [(2, 8.5), (3, 7.0), (4, 6.0), (6, 4.5)]
    heldout = [(row["_step"], row["loss/heldout(nats)"]) for row in rows if "loss/heldout(nats)" in row]
    assert heldout == [(3, 3.5), (6, 3.5)]
    tables = sorted(folder.glob("wandb/*run-*/files/media/table/*.json"))
    assert [json.loads(table.read_text())["data"] for table in tables] == [[[3, "def ", "<b>"]], [[6, "def ", "<b>"]]]
    summaries = [item for record in records for item in record.get("summary", {}).get("update", [])]
    assert {"key": "heldout_loss", "value_json": "3.5"} in summaries
    assert exit_codes(records) == [0, 0]


def test_a_server_that_cannot_be_reached_costs_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is written as in mode offline, and one that ends without RunFinished is marked as failed."""
    monkeypatch.setattr("diloco.monitor.wandb_runs.LONGEST_START_S", 0.5)
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1:9\nlogin user\npassword {'k' * 40}\n")
    (tmp_path / "netrc").chmod(0o600)
    sink = WandbSink(WandbSettings(mode="online"), tmp_path / "run", every_steps=1, config={})
    sink.handle(started())
    sink.handle(step(1, 2.0))
    sink.close()
    end_service()
    words = capsys.readouterr().err
    assert "W&B can't be reached" in words
    assert f"is written to {tmp_path / 'run' / 'wandb'} instead" in words
    records = sent(tmp_path / "run")
    assert [row["loss/train(nats)"] for row in history(records)] == [2.0]
    assert exit_codes(records) == [1]


def test_online_without_a_key_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"needs an API key\. Run `wandb login`, set WANDB_API_KEY, or"):
        make_sinks(MonitorSettings(wandb=WandbSettings(mode="online")), tmp_path / "run", is_terminal=False)
    assert not (tmp_path / "run").exists()


def test_without_wandb_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'diloco\[wandb\]'"):
        WandbSink(WandbSettings(mode="offline"), tmp_path, every_steps=1, config={})


@pytest.mark.parametrize("settings", [{"every_steps": 0}, {"finish_timeout_s": 0.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"must be (at least 1|positive), got"):
        WandbSettings(**settings)


class Stuck:
    """A fake wandb whose service blocks until the test releases it, and then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        monkeypatch.setattr("wandb.init", lambda **_: self.answers.wait() and self)

    def log(self, values: dict[str, float], step: int) -> None:
        raise OSError("the pipe is broken")

    def finish(self, exit_code: int) -> None: ...


def test_a_service_that_takes_nothing_is_given_up_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = Stuck(monkeypatch)
    monkeypatch.setattr("diloco.monitor.wandb_runs.MOST_WAITING", 3)
    sinks = Sinks({"W&B": WandbSink(WandbSettings(mode="offline"), tmp_path, every_steps=1, config={})})
    sinks.handle(started())
    for number in range(1, 6):
        sinks.handle(step(number, 1.0))
    sinks.close()
    stuck.answers.set()
    assert capsys.readouterr().err == (
        "W&B failed at step 4 and is no longer written (RuntimeError: the queue to wandb is full, with 3 points); "
        "training continues.\n"
    )


def test_what_wandb_raises_in_its_thread_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = Stuck(monkeypatch)
    sinks = Sinks({"W&B": WandbSink(WandbSettings(mode="offline"), tmp_path, every_steps=1, config={})})
    sinks.handle(started())
    sinks.handle(step(1, 1.0))
    stuck.answers.set()
    sinks.close()
    assert capsys.readouterr().err.count("OSError: the pipe is broken") == 1


def test_trackers_that_nobody_asked_for_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run trains if none of the trackers is installed."""
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    words = [*SMALL.split(), str(write_text(tmp_path)), "--steps", "2", "--out", str(tmp_path / "run")]
    assert main(["train", *words, "--monitor.console", "quiet", "--monitor.no-tensorboard"]) == 0


@pytest.mark.parametrize(
    ("flags", "role", "folder", "name", "group"),
    [
        ("", None, "runs/a", "a", None),
        ("--monitor.wandb.name n --monitor.wandb.group g", None, "runs/a", "n", "g"),
        ("--transport torch", Role("rank", 0), "runs/a", "a", "a"),
        ("--transport torch", Role("rank", 1), "runs/a/replica-1", "a-replica-1", "a"),
        ("--transport torch", Role("rank", 1, 2), "runs/a/replica-1/rank-2", "a-replica-1", "a"),
        ("--transport torch --monitor.wandb.name n", Role("rank", 1), "runs/a/replica-1", "n-replica-1", "n"),
        ("--transport hivemind --run r", None, "runs/a", "a-NODE", "r"),
    ],
)
def test_all_replicas_of_a_run_stand_together(
    monkeypatch: pytest.MonkeyPatch, flags: str, role: Role | None, folder: str, name: str, group: str | None
) -> None:
    monkeypatch.setattr("platform.node", lambda: "NODE")
    wandb = monitor_settings(load_configuration(flags.split()), Path(folder), role).wandb
    assert (wandb.name, wandb.group) == (name, group)
