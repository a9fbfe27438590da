"""The code of the GPU benchmark, run on the CPU at a size whose figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.checks import CHECKS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_part_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    common = ["--tiny", "--device", "cpu", "--out", str(out), "--peak-flops-per-s", "1e12"]
    assert main([*common, "--parts", "checks", "rounds"]) == 0
    assert main([*common, "--parts", "1b", "--only", "at once"]) == 0
    assert main([*common, "--parts", "150m", "sharing"]) == 0
    results = json.loads(out.read_text())
    assert results.keys() == {"about", "checks", "rounds", "1b", "150m", "sharing"}, "the parts add to one file"
    checks = {row["name"]: row["ok"] for row in results["checks"]}
    assert checks.keys() == CHECKS.keys()
    assert [name for name, ok in checks.items() if ok is None] == [
        "flash attention is taken",
        "documents by FlexAttention",
        "compiled blocks",
        "copies from another GPU arrive",
        "NCCL inside a replica",
    ]
    assert [row["name"] for row in results["1b"]] == ["diloco, loss of all logits at once"]
    names = {row["name"] for row in results["150m"]}
    assert {"diloco", "diloco, Muon inside", "transformers Trainer"} <= names
    assert all(row["step_s"] > 0 and row["model_flops_utilization"] > 0 for row in results["150m"])
    for row in results["rounds"]:
        assert row["round_s"] == pytest.approx(sum(row["parts_s"].values()))
        assert row["share"] == pytest.approx(row["round_s"] / (4 * row["step_s"]))
    assert [row["name"] for row in results["sharing"]] == ["one process", "1 processes"]
    printed = capsys.readouterr().out
    for text in ("| diloco |", "Goal of 45 %: **not reached**", "Goal of less than 0.5 %", "| codecs give"):
        assert text in printed


def test_what_fails_is_said_and_the_exit_code_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise AssertionError("fp4 encodes 3 bytes differently")

    monkeypatch.setattr("benchmarks.gpu.checks.CHECKS", {"codecs": fails})
    out = tmp_path / "results.json"
    assert main(["--tiny", "--device", "cpu", "--out", str(out), "--parts", "checks"]) == 1
    (row,) = json.loads(out.read_text())["checks"]
    assert row == {"name": "codecs", "ok": False, "detail": "AssertionError: fp4 encodes 3 bytes differently"}
