"""The command as people and scripts call it: exit codes, messages, files."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco import __version__
from diloco.cli import COMMANDS, main
from diloco.errors import ConfigurationError, DiLoCoError
from diloco.model.presets import get_preset, preset_names
from diloco.monitor.files import read_metrics

SMALL = """
algorithm = "streaming"
[train]
steps = 8
batch_size = 1
sequence_length = 16
data_parallel_steps = 2
device = "cpu"
[schedule]
inner_steps = 3
[fragments]
num_fragments = 2
[transport]
replicas = 2
[model]
layers = 1
width = 8
ffn_width = 16
heads = 2
[data]
document_separator = "\\n\\n"
heldout_fraction = 0.3
[evaluation]
every_steps = 0
sequences = 4
sample_tokens = 4
[checkpoint]
every_steps = 0
[monitor]
console = "quiet"
tensorboard = false
"""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``run.toml``, the text it trains on, and ``run``, a run stopped after step 6 of 8."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("\n\n".join(f"document {n}: " + "abc " * n for n in range(1, 40)))
    (folder / "run.toml").write_text(SMALL)
    done = main(["train", str(folder / "run.toml"), "--data", str(folder / "text.txt"), "--out", str(folder / "run"),
                 "--stop-after", "6"])  # fmt: skip
    assert done == 0
    return folder


def train(files: Path, *flags: str) -> list[str]:
    """The arguments of a small run."""
    return ["train", str(files / "run.toml"), "--data", str(files / "text.txt"), *flags]


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The message on stderr of a command that ends with ``code``, without a traceback and with nothing on stdout."""
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return " ".join(captured.err.replace("│", " ").split())


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def test_help_names_every_command_and_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"diloco {__version__}\n"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: diloco {command}")
    assert f"  diloco {command}" in shown.partition("Examples:")[2]
    assert "default: None" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["--verison"], "unknown option '--verison'; did you mean '--version'?"),
        ([], "usage: diloco"),
        (["evaluate"], "RUN"),
        (["generate", "a", "b"], "b"),
        (["inspect", "a", "--jsn"], "--json"),
        (["presets", "tiny"], "tiny"),
        (["generate", "a", "--num-samples", "0"], "--num-samples 0 was given; at least 1"),
        (["generate", "a", "--batch-size", "0"], "--batch-size 0 was given; at least 1"),
        (["generate", "a", "--seed", str(2**63)], f"--seed {2**63} was given; at most {2**63 - 2} would work"),
        (["export", "a", "b", "--max-shard-size", "5XB"], "--max-shard-size 5XB was given; a number in KB, MB, GB"),
        (["generate", "a", "--top-p", "2.0"], "top_p=2.0 was given; a number above 0 and up to 1"),
        (["generate", "a", "--device", "gpu"], "--device='gpu' was given; auto, cpu, cuda"),
        (["generate", "a", "--prompt", "x", "--prompt-file", "y"], "together with --prompt-file y; one of the two"),
        (["evaluate", "a", "--sequences", "-1"], "--sequences -1 was given; 0 or more"),
        (["evaluate", "a", "--stride", "0"], "--stride 0 was given; 1 or more"),
        (["evaluate", "a", "--by-document", "--sequences", "3"], "--sequences 3 was given with --by-document"),
        (["export", "a", "b", "--to", "safetensors", "--max-length", "9"], "--to hf would work"),
        (["train", "--stepz", "5"], "--steps"),
        (["train", "--preset", "tinny"], "no preset 'tinny'; did you mean 'tiny'?"),
        (["train", "absent.toml"], "absent.toml cannot be read"),
        (["train", "--codec", "int9"], "did you mean 'int8'"),
        (["train", "--transport", "hivemind"], "--run NAME"),
        (["train", "--transport", "torch", "--replica", "0"], "without transport.rendezvous; --rendezvous HOST:PORT"),
        (["train", "--rendezvous", "10.0.0.1", "--transport", "torch"], "without transport.replica; --replica 0"),
        (["train", "--algorithm", "diloco", "--overlap-steps", "1"], "--algorithm streaming would work"),
        (["train", "--algorithm", "data-parallel", "--codec", "fp4"], "--codec float32"),
        (["train", "--fragments", "6"], "1 to 5 would work"),
        (["train", "--steps", "0"], "at least 1 is needed"),
        (["train", "--resume", "absent"], "no config.toml in it"),
        (["train", "x.toml", "--resume", "absent"], "x.toml was given together with --resume"),
    ],
)
def test_misuse_ends_with_2_and_says_what_would_work(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["evaluate", "generate", "inspect", "export"])
def test_a_missing_checkpoint_ends_with_1(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = [str(tmp_path / "out")] if command == "export" else []
    assert "absent is not there" in refused([command, str(tmp_path / "absent"), *more], capsys, code=1)


def test_a_run_leaves_what_scripts_count_on(files: Path) -> None:
    summary = read_json(files / "run" / "summary.json")
    expected = {
        "heldout_loss", "perplexity", "bits_per_byte", "tokens", "steps", "sent_bytes_per_replica",
        "received_bytes_per_replica", "data_parallel_bytes_per_replica", "compute_utilization", "wall_s",
        "rounds_committed", "rounds_void", "global_params_digest",
    }  # fmt: skip
    assert expected <= summary.keys()
    assert (summary["steps"], summary["interrupted"]) == (6, None)
    record = tomllib.loads((files / "run" / "config.toml").read_text())
    assert record["data"]["paths"] == [str(files / "text.txt")]
    assert "stop_after" not in record["train"]
    assert "out" not in record


def test_a_resumed_run_ends_where_an_unbroken_one_does(files: Path, tmp_path: Path) -> None:
    assert main(train(files, "--out", str(tmp_path / "unbroken"))) == 0
    shutil.copytree(files / "run", tmp_path / "resumed")
    assert main(["train", "--resume", str(tmp_path / "resumed")]) == 0
    unbroken, resumed = (read_json(tmp_path / name / "summary.json") for name in ("unbroken", "resumed"))
    assert (resumed["steps"], resumed["rounds_committed"]) == (8, 3)
    for key in ("global_params_digest", "heldout_loss", "sent_bytes_per_replica", "rounds_committed"):
        assert resumed[key] == unbroken[key]


def test_a_checkpoint_can_go_on_in_another_folder(files: Path, tmp_path: Path) -> None:
    checkpoint = files / "run" / "checkpoints" / "step-00000006"
    out = tmp_path / "copy"
    before = sorted(files.rglob("*"))
    assert main(["train", "--resume", str(checkpoint), "--out", str(out)]) == 0
    assert sorted(files.rglob("*")) == before
    assert read_json(out / "summary.json")["steps"] == 8
    assert main(["evaluate", str(out), "--json"]) == 0
    assert main(["train", "--resume", str(out), "--steps", "8"]) == 0


def test_a_longer_run_is_told_of_and_recorded(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "run", tmp_path / "run")
    flags = ["--steps", "9", "--evaluation.sequences", "2", "--stop-after", "7"]
    assert main(["train", "--resume", str(tmp_path / "run"), *flags]) == 0
    [note] = read_metrics(tmp_path / "run" / "metrics.jsonl", "Note")
    assert "train.steps goes from 8 to 9: the learning-rate schedule" in note["text"]
    record = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (record["train"]["steps"], record["evaluation"]["sequences"]) == (9, 2)
    assert read_json(tmp_path / "run" / "summary.json")["steps"] == 7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--seed 3 --codec int8 --outer.learning-rate 0.1 --preset 2m --train.device cuda --data x",
            ["seed from 0 to 3", "codec.name from fp4 to int8", "data.paths from",
             "outer.learning_rate from 0.4 to 0.1", "preset from tiny to 2m", "train.device from cpu to cuda"],
        ),
        ("--init-from w.safetensors", ["train.init_from from None to"]),
        ("--steps 7", ["--steps 7", "8 or more would work"]),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_refuses_other_changes_by_name(
    files: Path, capsys: pytest.CaptureFixture[str], flags: str, words: list[str]
) -> None:
    message = refused(["train", "--resume", str(files / "run"), *flags.split()], capsys)
    for word in words:
        assert word in message


def test_unchanged_settings_may_be_given_again(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = ["--data", str(files / "text.txt"), "--replicas", "2", "--preset", "tiny", "--print-config"]
    assert main(["train", "--resume", str(files / "run"), *same]) == 0


def test_no_run_is_overwritten(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (files / "run" / "summary.json").read_bytes()
    message = refused(train(files, "--out", str(files / "run")), capsys)
    assert "is not empty" in message
    assert f"--resume {files / 'run'}" in message
    assert "is no folder" in refused(train(files, "--out", str(files / "run.toml")), capsys)
    occupied = ["train", "--resume", str(files / "run"), "--out", str(files)]
    assert "is not empty; another --out would work" in refused(occupied, capsys)
    assert (files / "run" / "summary.json").read_bytes() == before


def test_folders_are_numbered_and_an_empty_one_is_taken(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--steps", "2", "--algorithm", "none", "--evaluation.sample-tokens", "0"]
    assert [main(train(files, *short)) for _ in range(3)] == [0, 0, 0]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["none-tiny", "none-tiny-2", "none-tiny-3"]
    Path("empty").mkdir()
    assert main(train(files, *short, "--out", "empty")) == 0


def test_a_run_that_never_began_leaves_no_folder(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next attempt with the same --out works."""
    out = tmp_path / "run"
    arguments = train(files, "--out", str(out), "--steps", "2")
    wrong = [*arguments[:3], str(tmp_path / "absent"), *arguments[4:]]
    assert "absent" in refused(wrong, capsys, code=1)
    assert not out.exists()
    assert "torch.optim" in refused([*arguments, "--inner.name", "AdamZ"], capsys)
    assert not out.exists()
    assert main(arguments) == 0


def test_print_config_is_a_toml_file_with_what_follows(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train(files, "--print-config", "--codec", "int8")) == 0
    shown = capsys.readouterr().out
    values = tomllib.loads(shown)
    assert (values["codec"]["name"], values["merge"]["rule"], values["model"]["width"]) == ("int8", "rebase", 8)
    facts = dict(line[2:].split(": ", 1) for line in shown.splitlines() if line.startswith("# ") and ": " in line)
    assert facts["tokens"] == "256 in 8 steps of 32 (2 replicas x 1 sequences x 16)"
    assert facts["schedule"] == "fragment 0 at step 5, 1 at 6, and every 3 steps again; merged 1 later"
    assert facts["rounds"] == "3 in all (2, 1 by fragment)"


def test_evaluate_gives_the_numbers_of_the_end_of_the_run(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = read_json(files / "run" / "summary.json")
    assert main(["evaluate", str(files / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for key in ("heldout_loss", "perplexity", "bits_per_byte"):
        assert result[key] == summary[key]
    assert result["step"] == 6
    assert main(["evaluate", str(files / "run" / "checkpoints" / "step-00000006")]) == 0
    assert f"{summary['heldout_loss']:.4f} nats per token" in capsys.readouterr().out


def test_evaluate_on_other_text_uses_all_of_it(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text("x" * 16 * 10)
    assert main(["evaluate", str(files / "run"), "--data", str(tmp_path), "--sequences", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 16 * 10


def test_evaluate_slides_over_all_tokens_or_takes_each_document(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").write_text('{"body": "abcdé"}\n{"body": "' + "x" * 40 + '"}\n')
    arguments = ["evaluate", str(files / "run"), "--data", str(tmp_path), "--text-field", "body", "--json"]
    counts = {}
    for flags in ("--stride 4", "--by-document", "--by-document --stride 3 --sequence-length 8 --batch-size 1"):
        assert main([*arguments, *flags.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        counts[flags] = (found["tokens"], found["bytes"], found["documents"])
        assert found["bits_per_byte"] * found["bytes"] == pytest.approx(found["bits_per_token"] * found["tokens"])
    # packed: 46 bytes and 2 ends, of which the first byte is only seen; by document: bytes alone, and all of them
    assert list(counts.values()) == [(47, 45, 2), (46, 46, 2), (46, 46, 2)]
    assert "--sequence-length 2000" in refused([*arguments, "--sequence-length", "2000"], capsys)


def test_evaluate_and_generate_take_a_replica_or_an_earlier_step(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for flags in ([], ["--replica", "0"], ["--replica", "1", "--checkpoint", "6"]):
        assert main(["evaluate", str(files / "run"), "--json", *flags]) == 0
        losses.append(json.loads(capsys.readouterr().out)["heldout_loss"])
    assert len(set(losses)) == 3
    assert "there are: 6" in refused(["generate", str(files / "run"), "--checkpoint", "5"], capsys, code=1)
    assert main(["generate", str(files / "run"), "--replica", "1", "--tokens", "3"]) == 0


def test_generate_reads_a_file_stops_at_a_text_and_tells_scripts(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", str(files / "run"), "--tokens", "30", "--seed", "3", "--json"]
    (tmp_path / "prompt").write_text("é doc", encoding="utf-8")
    assert main([*arguments, "--prompt-file", str(tmp_path / "prompt"), "--num-samples", "2"]) == 0
    samples = json.loads(capsys.readouterr().out)
    assert [sample["prompt"] for sample in samples] == ["é doc"] * 2
    assert samples[0]["text"] != samples[1]["text"]
    alone = [*arguments, "--prompt-file", str(tmp_path / "prompt"), "--batch-size", "1", "--seed"]
    assert main([*alone, "3", "--num-samples", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == samples
    assert main([*alone, "4"]) == 0
    assert json.loads(capsys.readouterr().out) == samples[1:]  # the second one has the next seed
    text = samples[0]["text"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é doc".encode())))
    assert main([*arguments, "--prompt-file", "-", "--stop", "absent", text[4:6].replace("\n", "\\n")]) == 0
    [stopped] = json.loads(capsys.readouterr().out)
    assert (stopped["text"], stopped["ended_by"]) == (text[: text.index(text[4:6])], "stop")
    together = [*arguments, "--prompt-file", str(tmp_path / "prompt"), "--num-samples", "2", "--stop"]
    assert main([*together, text[4:6].replace("\n", "\\n")]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both == [stopped, both[1]]
    assert both[1]["text"] == samples[1]["text"].partition(text[4:6])[0]  # it went on without the first
    (tmp_path / "prompt").write_bytes(b"\xff")
    broken = refused([*arguments, "--prompt-file", str(tmp_path / "prompt")], capsys, code=1)
    assert "cannot be read" in broken
    assert "UTF-8, or - for standard input, would work" in broken


def test_an_exported_folder_evaluates_and_continues_as_the_run_does(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    assert main(["export", str(files / "run"), "--to", "hf", str(exported)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    results, texts = [], []
    for path in (files / "run", exported):
        flags = ["--data", str(files / "text.txt"), "--document-separator", "\n\n", "--sequences", "0", "--json"]
        assert main(["evaluate", str(path), *flags]) == 0
        results.append(json.loads(capsys.readouterr().out))
        assert main(["generate", str(path), "--prompt", "doc"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert results[1]["heldout_loss"] == pytest.approx(results[0]["heldout_loss"], rel=1e-6)
    assert (results[0]["tokens"], results[0]["step"]) == (results[1]["tokens"], 6)
    assert results[1]["step"] is None
    assert "so nothing was held out; --data PATH" in refused(["evaluate", str(exported)], capsys)
    assert "is no run" in refused(["generate", str(exported), "--replica", "0"], capsys)


def test_generate_is_reproducible_and_begins_with_the_prompt(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(files / "run"), "--tokens", "12", "--temperature", "1.5", "--top-k", "None"]
    texts = []
    for flags in (["--prompt", "doc"], ["--prompt", "doc"], ["--prompt", "doc", "--seed", "1"], []):
        assert main([*arguments, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("doc")
    assert main([*arguments, "--num-samples", "2"]) == 0
    assert "--- sample 2 of 2" in capsys.readouterr().out
    assert "--context 2000 was given; 1 to" in refused([*arguments, "--context", "2000"], capsys)


def test_inspect_says_what_a_checkpoint_holds(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(files / "run"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["step"] == 6
    assert record["about"]["num_replicas"] == 2
    assert [fragment["outer_step"] for fragment in record["about"]["fragments"]] == [1, 0]
    assert {"run", "global", "replica-0", "replica-1"} == record["parts"].keys()
    assert main(["inspect", str(files / "run")]) == 0
    shown = capsys.readouterr().out
    assert "algorithm" in shown
    assert "replica-1.safetensors" in shown
    assert record["about"]["global_params_digest"] in shown
    assert "fragment 1, outer step 0" in shown  # sent after step 6, so in flight


def test_presets_are_listed_with_exact_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(preset_names())
    assert all(len(line) <= 80 for line in lines)
    assert f"{get_preset('150m').parameters:,}" in "".join(lines)
    assert main(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["1b"]["settings"]["schedule.inner_steps"] == 125


def call_command(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Put ``run`` in the place of `diloco presets`."""
    import diloco.cli.presets

    monkeypatch.setattr(diloco.cli.presets, "run", run)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigurationError("bad. Nothing was started."), 2, "diloco: bad. Nothing was started.\n"),
        (DiLoCoError("failed"), 1, "diloco: failed\n"),
        (KeyboardInterrupt(), 130, "diloco: interrupted.\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise error

    call_command(monkeypatch, fail)
    assert main(["presets"]) == code
    assert capsys.readouterr().err == words
    assert main(["presets", "--debug"]) == code
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, DiLoCoError)


def test_an_unexpected_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise ZeroDivisionError

    call_command(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError):
        main(["presets"])


def test_an_interrupted_run_ends_with_130(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import diloco.train.run

    def stopped(settings: object, **arguments: object) -> Mapping[str, object]:
        return {"interrupted": "SIGTERM"}

    monkeypatch.setattr(diloco.train.run, "run_training", stopped)
    assert main(train(files, "--out", str(tmp_path / "run"))) == 130


def python(*code: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.Popen([sys.executable, *code], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


def test_help_presets_and_refusals_import_no_torch() -> None:
    code = """
import contextlib, io, sys
from diloco.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    calls = ["--help", "--version", "presets", "train --help", "evaluate --help", "train --codec zip"]
    codes = [main(call.split()) for call in calls]
assert codes == [0, 0, 0, 0, 0, 2], codes
print([name for name in ("torch", "tensorboard", "rich", "tokenizers", "pyarrow", "wandb") if name in sys.modules])
"""
    process = python("-c", code)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "[]\n", "")


@pytest.mark.parametrize("arguments", ["presets", "train --help"])
def test_a_reader_that_leaves_is_no_error_of_ours(arguments: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = python("-m", "diloco", *arguments.split(), stdout=writing)
    os.close(writing)
    _, err = process.communicate()
    assert (process.returncode, err) == (1, "")
