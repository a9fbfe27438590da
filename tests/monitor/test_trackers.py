"""TensorBoard, and Weights & Biases without a network."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco import events
from diloco.cli import main
from diloco.errors import ConfigurationError
from diloco.monitor import MonitorSettings, Sinks, make_sinks
from tests.monitor.made_events import committed, evaluated, started, step
from tests.runs import SMALL, write_text


def tracker(kind: str, folder: Path, **options: Any) -> Sinks:
    return make_sinks(MonitorSettings(console="quiet", sinks=(kind,)), folder, is_terminal=False, **options)


def track(sinks: Sinks, *facts: events.Event) -> None:
    for event in facts:
        sinks.handle(event)
    sinks.close()


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    if "sample/text_summary" in accumulator.Tags()["tensors"]:
        (sample,) = accumulator.Tensors("sample/text_summary")
        assert sample.tensor_proto.string_val[0] == b"    # a<b>\n    c"  # a code block
    return {tag: [(p.step, p.value) for p in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_shows_what_was_measured(tmp_path: Path) -> None:
    track(
        tracker("tensorboard", tmp_path),
        started(0),
        step(1, loss=4.0, step_s=0.5, model_flops_utilization=0.75),
        committed(0, 1, 0, step=1, wait_s=0.25, gain=0.5),
        committed(1, 1, 0, step=1, wait_s=0.75, gain=0.5),  # the same round
        evaluated(1, 3.5),
        step(2, loss=2.0, step_s=1.0),
        events.SampleGenerated(step=2, prompt="# a", text="<b>\nc"),
        events.RunFinished(step=2, summary={}),
    )
    assert curves(tmp_path) == {
        "loss": [(1, 4.0), (2, 2.0)],
        "learning_rate": [(1, 0.25), (2, 0.25)],
        "gradient_norm": [(1, 2.0), (2, 2.0)],
        "tokens": [(1, 1.0), (2, 2.0)],
        "step_s": [(1, 0.5), (2, 1.0)],
        "tokens_per_s": [(1, 16.0), (2, 16.0)],
        "model_flops_utilization": [(1, 0.75)],
        "compute_utilization": [(1, 0.75), (2, 0.75)],
        "sent_bytes": [(1, 1000.0), (2, 2000.0)],
        "received_bytes": [(1, 0.0), (2, 0.0)],
        "wait_s/fragment 1": [(1, 0.25)],
        "gain/fragment 1": [(1, 0.5)],
        "heldout_loss": [(1, 3.5)],
        "perplexity": [(1, pytest.approx(12.18))],
        "bits_per_byte": [(1, pytest.approx(3.6067))],
    }


def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    track(tracker("tensorboard", tmp_path), started(0), step(1), step(2), step(3, loss=9.0), evaluated(3, 9.0))
    track(tracker("tensorboard", tmp_path), started(2), step(3, loss=5.0), evaluated(3, 5.0))
    assert curves(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 5.0)]
    assert curves(tmp_path)["heldout_loss"] == [(3, 5.0)]


class Wandb:
    """Records what is said to wandb, whose file format is its own affair."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.exits: list[int] = []
        self.config = self.summary = self
        self.updates: list[dict[str, Any]] = []
        monkeypatch.setattr("wandb.init", lambda **options: (self.begun.append(options), self)[1])
        monkeypatch.setenv("WANDB_MODE", "offline")
        for name in ("PROJECT", "NAME", "RUN_GROUP"):
            monkeypatch.delenv(f"WANDB_{name}", raising=False)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def update(self, values: dict[str, Any], **_: Any) -> None:
        self.updates.append(values)

    def finish(self, exit_code: int) -> None:
        self.exits.append(exit_code)


def test_wandb_gets_a_new_run_where_writing_its_name_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, path = Wandb(monkeypatch), tmp_path / "wandb" / "id"
    path.parent.mkdir()
    path.touch()
    track(tracker("wandb", tmp_path), started(0))
    assert [each["id"] for each in wandb.begun] == [path.read_text().strip()]
    assert path.read_text().strip()


def test_wandb_gets_one_run_with_its_continuation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb(monkeypatch)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    options = {"config": {"data": {"paths": (Path("a"),)}}, "name": "run-replica-1", "group": "run"}
    finished = events.RunFinished(step=1, summary={"heldout_loss": 3.5})
    begun = started(0, details={"control addresses": "0 at 10.0.0.1:29400"})
    track(tracker("wandb", tmp_path, **options), begun, step(1), evaluated(1, 3.5), finished)
    track(tracker("wandb", tmp_path, **options), started(1))
    first, second = wandb.begun
    assert first["id"] == second["id"]
    assert first["project"] == "mine"
    assert (first["name"], first["group"], first["config"]) == ("run-replica-1", "run", {"data": {"paths": ["a"]}})
    losses = [(step, values.get("loss"), values.get("heldout_loss")) for step, values in wandb.logged]
    assert losses == [(1, 1.0, None), (1, None, 3.5)]
    assert wandb.updates[:2] == [{"facts": {"a": "b"}}, {"heldout_loss": 3.5}]
    assert wandb.exits == [0, 1]  # the second has not finished


def test_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for name, value in (("MODE", "offline"), ("X_DISABLE_STATS", "true"), ("X_DISABLE_META", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    track(tracker("wandb", tmp_path), started(0), step(1), events.SampleGenerated(step=1, prompt="def ", text="<b>"))
    wandb.teardown()  # its own process writes the last records
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [[1, "def ", "<b>"]]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(ConfigurationError, match=r"pip install 'diloco\[monitor\]'"):
        tracker(name, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_trains_where_no_tracker_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    words = [*SMALL.split(), str(write_text(tmp_path)), "--steps", "2", "--out", str(tmp_path / "run")]
    assert main(["train", *words, "--monitor.console", "quiet"]) == 0
