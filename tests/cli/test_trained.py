"""The commands that read a trained model: `diloco evaluate`, `generate`, `export` and `status`."""

import json
from pathlib import Path

import pytest

from diloco.cli import main
from tests.cli.runs import read_json, refused


@pytest.mark.parametrize("command", ["evaluate", "generate", "status", "export"])
def test_a_missing_checkpoint_ends_with_2(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ["--out", str(tmp_path / "out")] if command == "export" else []
    assert "absent does not exist" in refused([command, str(tmp_path / "absent"), *more], capsys)


def test_evaluate_gives_the_numbers_of_the_end_of_the_run(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = read_json(files / "run" / "summary.json")
    assert main(["evaluate", str(files / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for key in ("heldout_loss", "perplexity", "bits_per_byte"):
        assert result[key] == summary[key]
    assert result["step"] == 6
    assert main(["evaluate", str(files / "run" / "checkpoints" / "step-00000006")]) == 0
    assert f"{summary['heldout_loss']:.4f} nats per token" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["step-00000006", ".", "../step-00000006"])
def test_a_checkpoint_named_from_inside_its_run_finds_the_tokenizer_and_the_settings(
    place: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = files / "run" / "checkpoints"
    monkeypatch.chdir(checkpoints if place[0] == "s" else checkpoints / "step-00000006")
    assert main(["evaluate", place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heldout_loss"] == read_json(files / "run/summary.json")["heldout_loss"]


def test_evaluate_on_other_text_uses_all_of_it(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text("x" * 16 * 10)
    assert main(["evaluate", str(files / "run"), "--data", str(tmp_path), "--sequences", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 16 * 10


def test_generate_tells_scripts_what_ended_the_text(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(files / "run"), "--tokens", "30", "--prompt", "é doc", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["prompt"], record["tokens"], record["ended_by"]) == ("é doc", 30, "length")


def test_an_exported_folder_evaluates_and_continues_as_the_run_does(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    (tmp_path / "other.jsonl").write_text('{"text": "document one"}\n{"text": "document two"}\n')
    assert main(["export", str(files / "run"), "--to", "hf", "--out", str(exported)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    results, texts = [], []
    for path in (files / "run", exported):
        flags = ["--data", str(tmp_path / "other.jsonl"), "--text-field", "text", "--json"]
        assert main(["evaluate", str(path), *flags]) == 0
        results.append(json.loads(capsys.readouterr().out))
        assert main(["generate", str(path), "--prompt", "doc"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert results[1]["heldout_loss"] == pytest.approx(results[0]["heldout_loss"], rel=1e-6)
    assert (results[0]["tokens"], results[0]["step"]) == (results[1]["tokens"], 6)
    assert results[1]["step"] is None
    assert "so it has no held-out text: give --data PATH" in refused(["evaluate", str(exported)], capsys)


def test_generate_is_reproducible_and_begins_with_the_prompt(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(files / "run"), "--tokens", "12", "--temperature", "1.5", "--top-k", "None"]
    texts = []
    for flags in (["--prompt", "doc"], ["--prompt", "doc"], ["--prompt", "doc", "--seed", "1"], []):
        assert main([*arguments, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("doc")
    assert "--context with this model must be a whole number from 1 to" in refused(
        [*arguments, "--context", "2000"], capsys
    )


def test_status_says_what_a_checkpoint_holds(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(files / "run"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step"] == 6
    assert record["about"]["num_replicas"] == 2
    assert [fragment["outer_step"] for fragment in record["about"]["fragments"]] == [1, 0]
    assert {"run", "global", "replica-0", "replica-1"} <= record["parts"].keys()
    assert main(["status", str(files / "run")]) == 0
    shown = capsys.readouterr().out
    assert "algorithm" in shown
    assert "replica-1.safetensors" in shown
    assert max(map(len, shown.splitlines())) < 400, "it is read in a terminal"
    assert record["about"]["global_params_digest"] in shown
    assert "fragment 1, outer step 0" in shown  # sent after step 6, so in flight
