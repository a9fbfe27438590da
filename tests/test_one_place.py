"""What `docs/design.md` says of adding something, tried: each addition is made in a copy of the package, where it says.

A run of that copy then uses all of them at once.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diloco
from tests.runs import SMALL, write_text

CODEC = """

class Rounded(BFloat16):
    name = "rounded"
    carries_gradients = False
    needs_error_feedback = True
    left_out = "the colours"
    usual_error_feedback = 0.5

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel
"""
MERGE_RULE = """

@dataclass(frozen=True)
class MeetMerge:
    keeps_sent = False

    def merge(self, local: Tensor, global_params: Tensor, sent: Tensor | None) -> None:
        local.add_(global_params).mul_(0.5)
"""
OUTER_OPTIMIZER = """

@dataclass(frozen=True)
class Halving:
    lasting_gain = 9.0

    def init(self, values: Tensor) -> OuterState:
        return OuterState()

    def update(self, mean: Tensor, state: OuterState, values: Tensor) -> None:
        values.sub_(mean * 0.5)
        state.step += 1
"""
ADDITIONS: dict[str, list[tuple[str, str, str]]] = {
    "codec": [
        ("algorithm/codec/base.py", "", CODEC),
        ("algorithm/settings.py", '"topk2": "codec/topk2:TopK2",', ' "rounded": "codec/base:Rounded",'),
    ],
    "merge rule": [
        ("algorithm/optim.py", "", MERGE_RULE),
        ("algorithm/settings.py", '"rebase": "optim:RebaseMerge"', ', "meet": "optim:MeetMerge"'),
    ],
    "outer optimizer": [
        ("algorithm/optim.py", "", OUTER_OPTIMIZER),
        ("algorithm/settings.py", '"sgd": "optim:sgd"', ', "halving": "optim:Halving"'),
    ],
    "transport": [
        ("train/connecting.py", '"tcp": _over_tcp,', ' "wire": _over_tcp,'),
        (
            "transport/settings.py",
            "TRANSPORTS: Mapping[str, TransportTraits] = {",
            '"wire": TransportTraits(starts="launched", meets=True),',
        ),
    ],
    "source of text": [("data/source.py", '".json": _read_json,', ' ".poem": _read_lines,')],
    "chat template": [("data/templates/shout.jinja", "", "{{ bos_token }}")],
    "metric": [
        (
            "events.py",
            '"""Every replica of this process has finished one inner step."""',
            '\n    heat: Annotated[float, Metric("Heat of the device", "kelvin", column="heat")] = 301.5',
        )
    ],
    "setting": [
        (
            "train/settings.py",
            '"""Held-out evaluation of the global parameters."""',
            '\n    patience: Annotated[int, Meta(ge=1)] = 7\n    """How long to wait."""',
        )
    ],
}
"""What is added -> file, what stands there (nothing: the end), and what is written after it."""

SCRIPT = """
import contextlib, io, json, sys
from pathlib import Path
from diloco.cli import main

def say(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

folder, small, dashboard = Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3]
run = folder / "run"
added = "--codec rounded --error-feedback 0.5 --sync.merge meet --sync.outer halving --evaluation.patience 9".split()
said = {
    "help": say("train", "--help-all"),
    "run": say("train", *small, folder / "texts", *added, "--steps", "8", "--log", "plain", "--out", run),
    "bare codec": say("train", *small, folder / "texts", "--codec", "rounded"),
    "gradients": say("train", "--algorithm", "data-parallel", "--codec", "rounded"),
    "unknown": say("train", "--codec", "round", "--data", "x"),
    "range": say("train", "--evaluation.patience", "0"),
    "plan": say("plan", "--parameters", "7B", "--fragments", "4", "--step-time", "1s", "--bandwidth", "100Mbit"),
}
from diloco.config import compose, parse_arguments, plan_run
from diloco.train import role_of
def planned(*words):
    return plan_run(parse_arguments([*small, str(folder / "texts"), *words])).configuration
wire = planned("--transport", "wire", "--network.secret-file", str(folder / "secret"))
said["transport"] = [role_of(wire.network, None).kind]
said["wrong transport"] = say("train", "--join", "127.0.0.1:29400")
from diloco.data import DataSettings
said["template"] = DataSettings(format="shout", paths=("a.jsonl",)).format

from diloco.watch import FollowedFolder, PrometheusSink, page_data
import runpy, time
if said["run"]["code"]:
    sys.exit(said["run"]["err"])
followed = FollowedFolder(run)
while followed.read():
    pass
page = json.loads(page_data([followed.run], time.time()))
curve = page["runs"][0]["lines"][""]["StepFinished"]
said["page"] = [[m["title"] for m in page["metrics"] if m["name"] == "heat"],
                [row[curve["columns"].index("heat")] for row in curve["rows"]][-1]]
sink = PrometheusSink("127.0.0.1", 0, "run")
said["metrics"] = sink.metrics().decode()
sink.close()
from diloco.monitor import MonitorSettings, make_sinks
class Writer:
    def __init__(self, *_, **__):
        self.scalars = {}
    def add_scalar(self, name, value, step):
        self.scalars[name] = value
    def flush(self):
        pass
    close = flush
writer = Writer()
stub = type(sys)("tensorboard")
stub.SummaryWriter = lambda *_, **__: writer
sys.modules["torch.utils.tensorboard"] = stub
tracker = make_sinks(MonitorSettings(console="quiet", sinks=("tensorboard",)), folder / "tracked", is_terminal=False)
for event in followed.run.first.started, followed.run.first.last:
    tracker.handle(event)
tracker.close()
said["curves"] = {name: value for name, value in writer.scalars.items() if name == "heat"}
said["dashboard"] = json.dumps(runpy.run_path(dashboard)["dashboard"]())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the package with all additions, and return what it said."""
    folder = tmp_path_factory.mktemp("added")
    package, texts = folder / "src" / "diloco", folder / "texts"
    shutil.copytree(Path(diloco.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for changes in ADDITIONS.values():
        for name, before, addition in changes:
            file = package / name
            text = file.read_text() if file.exists() else ""
            assert text.count(before) == 1 or not before, f"{name} has {before!r} {text.count(before)} times"
            file.write_text(text.replace(before, before + addition) if before else text + addition)
    texts.mkdir()
    write_text(folder).rename(texts / "many.poem")
    dashboard = Path(__file__).parents[1] / "launch" / "grafana" / "dashboard.py"
    command = [sys.executable, "-c", SCRIPT, str(folder), SMALL, str(dashboard)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    answers["records"] = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    answers["config"] = (folder / "run" / "config.toml").read_text()
    return answers


def test_an_added_codec_carries_a_run_is_offered_planned_for_and_refused_where_its_traits_say_so(
    said: dict[str, Any],
) -> None:
    assert "every 4 steps as rounded" in said["run"]["out"]
    assert "did you mean 'rounded'" in said["unknown"]["err"]
    assert "leaves out the colours" in said["bare codec"]["err"]
    assert "--error-feedback 0.5" in said["bare codec"]["err"]
    assert "can't carry the gradients" in said["gradients"]["err"]
    assert "rounded" in said["plan"]["out"]


def test_an_added_merge_rule_and_an_added_outer_optimizer_take_part_in_a_run(said: dict[str, Any]) -> None:
    assert "outer halving" in said["run"]["out"]
    assert "has a gain of 9" in said["run"]["out"]
    assert {'merge = "meet"', 'outer = "halving"'} <= {*said["config"].splitlines()}
    assert [record for record in said["records"] if record["event"] == "RoundCommitted"]


def test_an_added_transport_is_offered_takes_the_settings_of_its_kind_and_starts_its_processes(
    said: dict[str, Any],
) -> None:
    assert said["transport"] == ["launcher"]
    assert "wire" in said["help"]["out"].partition("--transport")[2][:200]
    assert "--transport wire or tcp or swarm" in said["wrong transport"]["err"]


def test_an_added_source_of_text_is_read_and_an_added_chat_template_is_a_format(said: dict[str, Any]) -> None:
    assert "39 documents" in said["run"]["out"]
    assert said["template"] == "shout"
    assert "chatml,plain,shout" in said["help"]["out"]


def test_an_added_metric_is_in_the_console_the_records_the_page_prometheus_and_grafana(said: dict[str, Any]) -> None:
    heads = next(line for line in said["run"]["out"].splitlines() if "perplexity" in line)
    row = next(line for line in said["run"]["out"].splitlines() if line.startswith("8/8 "))
    assert "heat" in heads.split()
    assert "302" in row.split()
    assert {record["heat"] for record in said["records"] if record["event"] == "StepFinished"} == {301.5}
    assert said["page"] == [["Heat of the device"], 301.5]
    assert "# HELP diloco_heat Heat of the device (kelvin)." in said["metrics"]
    assert "diloco_heat{" in said["dashboard"]
    assert said["curves"] == {"heat": 301.5}


def test_an_added_setting_is_a_flag_with_help_a_range_and_a_line_of_the_configuration(said: dict[str, Any]) -> None:
    assert "How long to wait." in said["help"]["out"]
    assert "patience = 9" in said["config"].splitlines()
    assert "evaluation.patience must be a whole number of at least 1, got 0" in said["range"]["err"]
