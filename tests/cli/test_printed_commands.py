"""Commands that are printed are pasted: those of the help texts and of the messages run as they stand."""

import importlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.cli import COMMANDS, main
from tests.cli.runs import SMALL

ELSEWHERE = re.compile("203[.]0|10[.]0[.]0|hf:|llama|mine|runs/[abc] |relay|stride|USER/NAME")
LONG = ("diloco train", "diloco train run.toml", "diloco train --algorithm", "diloco watch runs/streaming-tiny")


def of_help() -> list[str]:
    """Return the examples of all help texts that need no other machine and no long training."""
    modules = [f"diloco.cli.{module}" for module, _ in COMMANDS.values() if module != "train"]
    values = [value for name in dict.fromkeys(modules) for value in vars(importlib.import_module(name)).values()]
    texts = dict.fromkeys(value if isinstance(value, str) else value.__doc__ or "" for value in values)
    lines = [
        line.strip()
        for text in texts
        for line in text.partition("Examples:")[2].splitlines()
        if re.match(r"  .*diloco \w", line)
    ]
    lines += ["diloco train --resume runs/streaming-tiny", "diloco train --preset tiny --data notes --print-config"]
    commands = [re.split(r" {3,}", line)[0].replace("00300", "00006").replace("300", "6") for line in lines]
    return [each for each in commands if not ELSEWHERE.search(each) and each not in LONG]


@pytest.fixture(scope="module")
def exported(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(files / "run"), "--out", str(out)]) == 0
    return out


@pytest.fixture
def place(files: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with what the examples name."""
    for name in ("runs/streaming-tiny", "runs/my $run"):
        shutil.copytree(files / "run", tmp_path / name)
    for name in ("books", "texts", "notes"):
        (tmp_path / name).mkdir()
        for copy in range(99):
            (tmp_path / name / f"{copy}.txt").write_text(f"document {copy}: " + "abc " * 9)
    (tmp_path / "beginning.txt").write_text("document ")
    (tmp_path / "test.jsonl").write_text('{"body": "abc abc abc abc abc abc abc abc"}\n' * 4)
    (tmp_path / "run.toml").write_text(SMALL)
    (tmp_path / "study.toml").write_text("[base]\n" + SMALL.replace("\n[", "\n[base.") + "[axes]\nseed = [1, 2]\n")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported, "exported")
    return tmp_path


@pytest.mark.parametrize("command", of_help())
def test_an_example_of_the_help_runs(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piped = command.rpartition("| ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"document ")))
    words = shlex.split(piped[2])
    words += (
        ["--overwrite"] if "export runs/streaming-tiny --out exported" in command and "--overwrite" not in words else []
    )
    assert main(words[1:]) == 0


def refused(arguments: list[str]) -> None:
    assert main(arguments) == 2


def interrupted(arguments: list[str]) -> None:
    Path("stops.py").write_text(
        "import os, signal\nfrom diloco.events import StepFinished\n"
        "class At:\n    def __init__(self, folder): pass\n    def close(self): pass\n"
        "    def handle(self, event):\n"
        "        if isinstance(event, StepFinished) and event.step == 2: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    assert main([*arguments, "--monitor.sinks", "stops.py:At"]) == 130


MESSAGES: tuple[tuple[Callable[[list[str]], None], str], ...] = (
    (interrupted, "train run.toml --data notes --out 'my ü run'"),
    (interrupted, "train run.toml --data notes --out ./-dash"),
    (refused, "train run.toml --data notes --out 'runs/my $run'"),
    (refused, "train resumes.toml"),
)


@pytest.mark.parametrize(("outcome", "words"), MESSAGES)
def test_the_command_in_a_message_runs(
    outcome: Callable[[list[str]], None], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SMALL.replace("[checkpoint]\n", "[checkpoint]\nresume = 'runs/my $run'\n")
    (place / "resumes.toml").write_text(text)
    capsys.readouterr()
    outcome(shlex.split(words))
    told = capsys.readouterr().err
    found = re.findall(r"`(diloco .*?)`|To resume: (diloco .*)", told)
    command = "".join(found[0])
    assert main(shlex.split(command)[1:]) == 0, command
