"""The command `diloco train`: the files of a run, resuming, and run folders."""

import os
import re
import shutil
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from diloco.checkpoint import list_checkpoints, lock_folder
from diloco.cli import main
from diloco.config import parse_arguments
from diloco.errors import ConfigurationError
from diloco.monitor import read_metrics
from tests.cli.runs import read_json, refused, train
from tests.commands import Command
from tests.processes import Processes, free_port
from tests.runs import of_torchrun


def test_a_checkpoint_can_go_on_in_another_folder(files: Path, tmp_path: Path) -> None:
    checkpoint = files / "run" / "checkpoints" / "step-00000006"
    out = tmp_path / "copy"
    before = sorted(files.rglob("*"))
    assert main(["train", "--resume", str(checkpoint), "--out", str(out)]) == 0
    assert sorted(files.rglob("*")) == before
    assert read_json(out / "summary.json")["steps"] == 8
    assert main(["evaluate", str(out), "--json"]) == 0
    assert main(["train", "--resume", str(out), "--steps", "8"]) == 0
    at_once = tmp_path / "at-once"  # stopped before another step, it has what it resumes from
    assert main(["train", "--resume", str(checkpoint), "--out", str(at_once), "--stop-after", "6"]) == 0
    same = ["--train.activation-checkpointing", "full", "--train.global-device", "cpu"]
    assert main(["train", "--resume", str(at_once), *same]) == 0
    digests = {read_json(folder / "summary.json")["global_params_digest"] for folder in (out, at_once)}
    assert len(digests) == 1, "what changes no bit may change"


def test_a_longer_run_is_told_of_and_recorded(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "run", tmp_path / "run")
    flags = ["--steps", "9", "--evaluation.sequences", "2", "--stop-after", "7"]
    assert main(["train", "--resume", str(tmp_path / "run"), *flags]) == 0
    [note] = read_metrics(tmp_path / "run" / "metrics.jsonl", "Note")
    assert "train.steps changes from 8 to 9: the learning-rate schedule" in note["text"]
    record = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (record["train"]["steps"], record["evaluation"]["sequences"]) == (9, 2)
    assert read_json(tmp_path / "run" / "summary.json")["steps"] == 7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--seed 3 --codec int8 --outer-learning-rate 0.1 --preset 2m --device cuda --data x",
            ["seed from 0 to 3", 'sync.codec from "fp4" to "int8"',
             "sync.outer_learning_rate from 0.4 to 0.1",
             'preset from "tiny" to "2m"', 'train.device from "cpu" to "cuda"'],
        ),
        ("--init-from w.safetensors", ["train.init_from from none to"]),
        ("--steps 7", ["--steps 7", "give 8 or more"]),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_refuses_other_changes_by_name(
    files: Path, capsys: pytest.CaptureFixture[str], flags: str, words: list[str]
) -> None:
    message = refused(["train", "--resume", str(files / "run"), *flags.split()], capsys)
    for word in words:
        assert word in message
    same = ["--data", str(files / "text.jsonl"), "--replicas", "2", "--preset", "tiny", "--print-config"]
    assert main(["train", "--resume", str(files / "run"), *same]) == 0, "unchanged settings may be given again"


def test_a_change_is_recorded_once_the_run_goes_on_with_it(files: Path, tmp_path: Path) -> None:
    """Regression: after a refusal the number of steps could not be put back, as it may only rise."""
    shutil.copytree(files, tmp_path / "files")
    run = tmp_path / "files" / "run"
    shutil.copyfile(files / "run.toml", tmp_path / "files" / "text.jsonl")
    record = (run / "config.toml").read_text().replace(str(files), str(tmp_path / "files"))
    (run / "config.toml").write_text(record)
    assert main(["train", "--resume", str(run), "--steps", "900"]) == 1, "the data have changed"
    assert (run / "config.toml").read_text() == record


@pytest.mark.parametrize("command", ["train --resume RUN", "finetune --resume RUN", "evaluate RUN"])
def test_a_run_with_other_settings_is_refused_by_the_first_of_them_and_its_model_generates(
    command: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(files / "run", run)
    (run / "config.toml").write_text("seed = 0\n[schedule]\ninner_steps = 3\n[transport]\nreplicas = 2\n")
    said = refused(command.replace("RUN", str(run)).split(), capsys)
    assert f"{run / 'config.toml'}: unknown key 'schedule'" in said
    assert main(["generate", str(run), "--tokens", "1"]) == 0


def test_no_run_is_overwritten(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (files / "run" / "summary.json").read_bytes()
    message = refused(train(files, "--out", str(files / "run")), capsys)
    assert "is not empty" in message
    assert f"--resume {files / 'run'}" in message
    assert "is not a folder" in refused(train(files, "--out", str(files / "run.toml")), capsys)
    occupied = ["train", "--resume", str(files / "run"), "--out", str(files)]
    assert "is not empty. Choose another --out." in refused(occupied, capsys)
    assert (files / "run" / "summary.json").read_bytes() == before


def test_folders_are_numbered_and_an_empty_one_is_taken(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--steps", "2", "--algorithm", "data-parallel", "--evaluation.sample-prompts"]
    assert [main(train(files, *short)) for _ in range(3)] == [0, 0, 0]
    assert sorted(path.name for path in Path("runs").iterdir()) == [f"data-parallel-tiny{n}" for n in ("", "-2", "-3")]
    Path("empty").mkdir()
    assert main(train(files, *short, "--out", "empty")) == 0


def test_a_run_that_never_began_leaves_no_folder(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next attempt with the same --out succeeds."""
    out = tmp_path / "run"
    arguments = train(files, "--out", str(out), "--steps", "2")
    wrong = [*arguments[:3], str(tmp_path / "absent"), *arguments[4:]]
    assert "absent does not exist" in refused(wrong, capsys)
    assert not out.exists()
    assert "torch.optim" in refused([*arguments, "--optimizer.name", "AdamZ"], capsys)
    assert not out.exists()
    (tmp_path / "file").write_text("")
    for flag in ("--checkpoint.mirror", "--resume-or-start"):  # here a place that can't be written to
        url = f"file://{tmp_path}/file/mine"
        assert main([*arguments, flag, url]) == 1
        assert "can't be written to" in capsys.readouterr().err
        assert not out.exists()
    assert main([*arguments, "--resume-or-start", f"file://{tmp_path}/bucket/mine"]) == 0


def test_only_what_an_attempt_has_written_is_deleted(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: without --replica, a machine of replica 1 alone lost its checkpoints with the failed attempt."""
    run = tmp_path / "run"
    shutil.copytree(files / "run", run / "replica-1")
    before = sorted(run.rglob("*"))

    def fails(*_: object) -> int:
        (run / "metrics.jsonl").touch()
        return 130

    monkeypatch.setattr("diloco.train.launch", fails)
    resume = ["train", "--resume", str(run), "--transport", "tcp"]
    assert main(resume) == 130
    assert "the state is saved. To resume: " in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before
    assert main([*train(files, "--transport", "tcp", "--out", str(tmp_path / "new"))]) == 130
    assert "stopped before anything was saved" in capsys.readouterr().err


def test_a_replica_goes_on_in_no_folder_of_another_run(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(files, "--out", str(tmp_path / "run"), "--replicas", "1", "--stop-after", "3")) == 0
    over_tcp = ["--transport", "tcp", "--replica", "0", "--join", f"127.0.0.1:{free_port()}"]
    resume = ["train", "--resume", str(tmp_path / "run"), *over_tcp]
    assert "is not empty" in refused([*resume, "--out", str(files / "run")], capsys)
    assert main([*resume, "--out", str(tmp_path / "new")]) == 0


def test_a_run_that_was_killed_before_it_began_does_not_block_its_folder(files: Path, tmp_path: Path) -> None:
    """Regression: the empty logs of processes that were killed while they waited for each other."""
    (tmp_path / "replica-1").mkdir()
    for name in ("metrics.jsonl", "identity.key", "replica-1/metrics.jsonl", "replica-1/diloco.lock"):
        (tmp_path / name).touch()
    assert main(train(files, "--out", str(tmp_path), "--steps", "2")) == 0


def test_print_config_is_a_toml_file_with_what_follows(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train(files, "--print-config", "--codec", "int8")) == 0
    shown = capsys.readouterr().out
    values = tomllib.loads(shown)
    assert (values["sync"]["codec"], values["sync"]["merge"]) == ("int8", "rebase")
    assert values["model"]["arguments"]["width"] == 8
    facts = dict(line[2:].split(": ", 1) for line in shown.splitlines() if line.startswith("# ") and ": " in line)
    assert facts["rounds"] == "2 data-parallel steps, then 2 fragments every 3 steps as int8"
    assert re.match(r"[\d.]+ kB in each data-parallel step, then [\d.]+ (kB|B) per replica and step", facts["traffic"])
    assert facts["token weighting"] == "by the steps trained, in batches of 1 x 16"


def test_a_folder_that_can_not_be_made_is_a_sentence(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = files / "text.jsonl" / "run"
    message = refused(train(files, "--out", str(in_the_way)), capsys)
    assert message == f"diloco: {in_the_way} can't be written: Not a directory. Nothing was started."
    (tmp_path / "runs").touch()
    monkeypatch.chdir(tmp_path)
    assert "can't be created: File exists. Choose another --out" in refused(train(files), capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        "train {run}.toml --data {text} --out {out}",
        "train --resume {out}",
        "train --resume {out}/checkpoints/step-00000006",
        "train --resume {run} --out {out}",
        "train {run}.toml --data {text} --out {out} --transport tcp",
        "train {run}.toml --data {text} --out {out} --transport tcp --replica 0 --join 127.0.0.1:1",
        "train {run}.toml --data {text} --out {out} --transport swarm --run a",
        "sweep {study} --out {out}",
    ],
)
def test_a_folder_in_use_is_refused_and_nothing_in_it_changes(
    arguments: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, study = tmp_path / "run", tmp_path / "study.toml"
    shutil.copytree(files / "run", out)
    study.write_text("[axes]\nseed = [0]\n")
    words = arguments.format(run=files / "run", text=files / "text.jsonl", out=out, study=study).split()
    with lock_folder(out):
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert f"{out} is in use by process {os.getpid()}" in refused(words, capsys)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_folder_in_use_can_be_read(files: Path, tmp_path: Path) -> None:
    with lock_folder(files / "run"):
        for command in ("status", "evaluate", f"watch --out {tmp_path / 'page.html'}"):
            assert main([*command.split(), str(files / "run")]) == 0


def test_a_live_run_is_not_resumed_and_a_killed_one_is_at_once(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    endless = train(files, "--out", str(out), "--steps", "100000", "--checkpoint.every-steps", "2")
    resume = ["train", "--resume", str(out)]

    def saved() -> list[int]:
        return [checkpoint.step for checkpoint in list_checkpoints(out / "checkpoints")]

    with Processes() as processes:
        first = Command(processes, endless, tmp_path / "first.txt")
        first.until(lambda: bool(saved()), "a checkpoint")
        second = Command(processes, resume, tmp_path / "second.txt")
        second.end(2)
        assert f"{out} is in use by process {first.pid} on" in second.output
        processes.kill(first.rank)
        before = saved()
        third = Command(processes, resume, tmp_path / "third.txt")
        third.until(lambda: saved()[-1:] > before[-1:], "another checkpoint")


LATE = "--data-parallel-steps 0 --emulate.bandwidth 1kbit --emulate.step-time 10ms --network.round-timeout 20ms"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--replicas 1", 0),
        ("--inner-steps 20 --algorithm diloco --fragments 1", 0),  # no round is due
        (LATE, 1),
        (f"--stop-after 6 {LATE}", 1),
    ],
)
def test_a_run_whose_rounds_were_all_void_fails(
    flags: str, code: int, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(files, "--out", str(tmp_path / "run"), *flags.split())) == code
    last = capsys.readouterr().err.strip().rpartition("\n")[2]
    assert last.startswith("diloco: no round was committed") == (code == 1)
    assert code == 0 or "Remove the cause, then start a new run." in last


@pytest.mark.parametrize(
    ("joined", "interrupted", "code", "then"), [(5, None, 0, ""), (None, "SIGTERM", 130, "resume")]
)
def test_only_who_was_there_from_the_start_is_told_that_nothing_was_learned(
    joined: int | None,
    interrupted: str | None,
    code: int,
    then: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Who has joined has adopted what the others have learned; who is stopped may resume."""
    more = {"joined_at_step": joined, "interrupted": interrupted, "rounds_void": 1, "rounds_committed": 0}
    monkeypatch.setattr("diloco.train.run_training", lambda *_, **__: more)
    assert main(train(files, "--out", str(tmp_path / "run"))) == code
    assert ("Remove the cause, then resume." in capsys.readouterr().err) == bool(then)


def test_torchrun_takes_a_settings_file(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file says nothing about how replicas are connected, so the environment of torchrun does."""
    (tmp_path / "run.toml").write_text("[train]\nsteps = 9\n")
    for name, value in of_torchrun(0, 3, 1).items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tmp_path / "run.toml"), "--print-config"]) == 0
    network = tomllib.loads(capsys.readouterr().out)["network"]
    assert (network["transport"], network["replicas"]) == ("torch", 3)
    assert main(["train", str(tmp_path / "run.toml"), "--replica", "1", "--join", "a:1", "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["network"]["transport"] == "tcp"


def test_a_machine_that_is_taken_away_goes_on_with_the_same_line(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins; its disk is lost; it resumes from the bucket; and the result is that of a run without all that."""
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket/mine"
    line = [*train(files, "--steps", "8", "--checkpoint.every-steps", "3"), "--resume-or-start", url]
    assert main([*line, "--stop-after", "6"]) == 0
    shutil.rmtree("runs")
    assert main(line) == 0
    assert main(train(files, "--out", "undisturbed")) == 0
    lost, undisturbed = read_json(Path("runs/mine/summary.json")), read_json(Path("undisturbed/summary.json"))
    assert lost["global_params_digest"] == undisturbed["global_params_digest"]
    steps = [record["step"] for record in read_metrics(Path("runs/mine/metrics.jsonl"), "StepFinished")]
    assert steps == list(range(1, 9)), "the log of the lost machine goes on"
    # what it left is one whole run, for others too
    resume = ["--data", str(files / "text.jsonl"), "--steps", "9"]
    assert main(["train", "--resume", url, *resume, "--out", "longer"]) == 0
    assert read_json(Path("longer/summary.json"))["steps"] == 9
    shutil.copytree("bucket/mine", "bucket/copy")
    copy = ["train", "--resume", f"file://{tmp_path}/bucket/copy", *resume, "--out", "copy"]
    assert f"need --checkpoint.mirror file://{tmp_path}/bucket/copy, and a bucket can't" in refused(copy, capsys)
    assert not Path("copy").exists()
    assert main([*copy, "--checkpoint.mirror", copy[2], "--stop-after", "9"]) == 0
    assert read_json(Path("bucket/mine/writer.json")) != read_json(Path("bucket/copy/writer.json"))
    for refusal, words in {
        "has a run whose checkpoint.mirror is None": ["train", "--resume", url, "--out", "undisturbed"],
        "has the checkpoints of a run": train(files, "--checkpoint.mirror", url, "--out", "second"),
        "has no checkpoint. Nothing was": ["train", "--resume", f"{url}2"],
        "has no name for a run folder": ["train", "--resume", f"{url}/.."],
        "is neither a path nor a URL such as": train(files, "--checkpoint.mirror", "s3:/bucket"),
    }.items():
        assert refusal in refused(words, capsys)
    assert not Path("runs/mine2").exists()


def test_a_bucket_chooses_no_file_and_no_sink(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/bucket/mine"
    (files / "mine.toml").write_text((files / "run.toml").read_text() + 'sinks = ["tensorboard"]\n')
    line = ["train", str(files / "mine.toml"), "--data", str(files / "text.jsonl"), "--resume-or-start", url]
    assert main([*line, "--stop-after", "4", "--checkpoint.every-steps", "4"]) == 0
    shutil.move("runs", "before")
    needs = (
        f"need --data {files}/text.jsonl --sinks tensorboard, and a bucket can't choose that here. Nothing was fetched."
    )
    assert needs in refused(["train", "--resume", url], capsys)
    (there,) = Path("bucket/mine").glob("checkpoints/*/home/config.toml")
    stored = there.read_text()
    there.write_text(stored.replace("join = []", 'join = ["evil:1"]'))
    needs = "need --join evil:1, and a bucket can't choose that here"
    assert needs in refused(
        ["train", "--resume", url, "--data", f"{files}/text.jsonl", "--sinks", "tensorboard"], capsys
    )
    there.write_text(stored)
    assert not Path("runs/mine").exists()
    other = [word.replace("text.jsonl", "run.toml") for word in line]
    assert "Use the model, the files and the tokenizer with which the run started" in refused(other, capsys, 1)
    assert main([*line, "--stop-after", "6"]) == 0, "the file says the same"


def test_a_foreign_folder_resumes_only_after_telling_what_it_reads_writes_and_listens_at(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(train(files, "--stop-after", "2", "--out", str(out))) == 0
    config = out / "config.toml"
    text = config.read_text().replace("[checkpoint]", f'[checkpoint]\nmirror = "{tmp_path}/theirs"')
    capsys.readouterr()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(text.replace("[monitor]", f'[monitor]\nprometheus = "{address}"'))
        assert main(["train", "--resume", str(out)]) == 2
    told, refusal = capsys.readouterr().err.splitlines()[:2]
    assert f"the settings in {out} name places outside it: " in told
    for flag in (f"--data {files}/text.jsonl", f"--checkpoint.mirror {tmp_path}/theirs", address):
        assert flag in told
    assert "can't be listened at" in refusal
    assert not (tmp_path / "theirs").exists()
    typed = ["--checkpoint.mirror", str(tmp_path / "mine"), "--monitor.prometheus", address]
    typed += ["--data", f"{files}/text.jsonl"]
    assert main(["train", "--resume", str(out), *typed]) == 0
    assert "name places" not in capsys.readouterr().err, "who types them knows them"


def test_resume_or_start_of_a_folder(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*train(files, "--checkpoint.every-steps", "3"), "--resume-or-start", str(tmp_path / "run")]
    assert main([*line, "--stop-after", "6"]) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # killed before its first checkpoint
    again = f"To begin the run there again, give --resume-or-start {tmp_path / 'run'} in its place"
    assert again in refused([*line[:-2], "--out", str(tmp_path / "run")], capsys)
    assert main([*line, "--stop-after", "6"]) == 0
    assert main(line) == 0
    starts = read_metrics(tmp_path / "run" / "metrics.jsonl", "RunStarted")
    assert [start["step"] for start in starts] == [0, 0, 6]
    assert read_json(tmp_path / "run" / "summary.json")["steps"] == 8
    assert "is not empty" in refused([*train(files), "--resume-or-start", str(files)], capsys)
    assert "Drop --out" in refused([*line[:-1], str(tmp_path / "new"), "--out", str(tmp_path / "other")], capsys)
    assert "both given" in refused([*line, "--resume", str(tmp_path / "run")], capsys)


@pytest.mark.parametrize("left", ["identity.key", "metrics.jsonl", "replica-1/identity.key"])
def test_resume_of_what_a_run_left_that_was_killed_before_it_met_the_others_begins_it_as_new(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    """The folder has no settings, so the command needs them. Before, only the command without --resume worked."""
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).touch()
    for more in ([], ["--join", "127.0.0.1:1"]):
        assert f"and --out {tmp_path}" in refused(["train", "--resume", str(tmp_path), *more], capsys)
    assert main([*train(files), "--resume", str(tmp_path), "--steps", "2"]) == 0
    assert "ended before its first checkpoint, so it begins again, as this command says" in capsys.readouterr().err
    assert read_json(tmp_path / "summary.json")["steps"] == 2


def test_resume_of_a_run_that_was_killed_before_its_first_checkpoint_begins_it_as_new(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the settings in its folder, those included that a resumed run takes from its checkpoint."""
    run, weights = tmp_path / "run", str(files / "run")
    arguments = ["--replicas", "1", "--init-from", weights, "--out"]
    assert main(train(files, *arguments, str(tmp_path / "whole"))) == 0
    assert main(train(files, *arguments, str(run), "--stop-after", "3")) == 0
    (saved,) = (run / "checkpoints").iterdir()
    saved.rename(run / "checkpoints" / f".{saved.name}.1.saving")  # killed while it was written
    assert main(["train", "--resume", str(run)]) == 0
    assert f"so it begins again, as {run / 'config.toml'} says" in capsys.readouterr().err
    assert [start["step"] for start in read_metrics(run / "metrics.jsonl", "RunStarted")] == [0, 0]
    ends = [read_json(folder / "summary.json")["global_params_digest"] for folder in (run, tmp_path / "whole")]
    assert ends[0] == ends[1]


def test_resume_of_an_empty_folder_or_of_a_damaged_checkpoint_begins_nothing(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder may be another one than was meant, and the checkpoint may be mended."""
    (tmp_path / "empty").mkdir()
    empty = ["train", "--preset", "tiny", "--data", str(files / "text.jsonl"), "--resume", str(tmp_path / "empty")]
    assert "must be a run folder" in refused(empty, capsys)
    shutil.copytree(files / "run", tmp_path / "run")
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 1
    assert "has no manifest.json, so it is not a complete checkpoint" in capsys.readouterr().err


def test_the_processes_of_replicas_get_what_was_typed_with_places_after_dashes(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, commands = tmp_path / "run.toml", list[list[str]]()
    file.write_text(f'[data]\npaths = ["{files / "text.jsonl"}"]\n')
    monkeypatch.setattr("diloco.train.launch", lambda network, command, *_: commands.append(command(1, "h:1")) or 0)
    words = ["train", "--transport", "tcp", "--replicas", "2", "--out", str(tmp_path / "out"), "--", str(file)]
    assert main(words) == 0
    line = parse_arguments(commands[0][1:])
    assert (line.file, line.values["network.join"], line.values["network.replica"]) == (file, ("h:1",), 1)
    assert main(["--debug", *words]) == 0
    assert "--debug" in commands[1][: commands[1].index("--")]


@pytest.mark.parametrize(("term", "moves"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_moves_no_cursor_gets_plain_lines(
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    term: str,
    moves: bool,
) -> None:
    """The live display would show nothing before the end there."""

    def seen(*_: object, is_terminal: bool, **__: object) -> None:
        raise ConfigurationError(f"live: {is_terminal}")

    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("diloco.monitor.make_sinks", seen)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(train(files, "--out", str(tmp_path / "out"))) == 2
    assert f"live: {moves}" in capsys.readouterr().err
