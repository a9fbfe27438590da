"""The command line: help, error messages, exit codes, and modules that it must not import."""

import errno
import os
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from tyro.conf import Positional

from diloco import __version__
from diloco.cli import COMMANDS, main
from diloco.config import parse_options
from diloco.errors import DEBUG, ConfigurationError, DiLoCoError
from diloco.traits import Trait
from tests.cli.runs import refused


def test_help_names_every_command_and_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"diloco {__version__}\n"
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: diloco {command}")
        assert f"  diloco {command}" in shown.partition("Examples:")[2]
        assert not re.search(r"default: None|\{None\}|\[(STR|PATH|INT)\b|\bSTR\|", shown), "values as people name them"


SIZE = "--parameters 7B --fragments 4 --replicas 4"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--verison", "unknown option '--verison'; did you mean '--version'?"),
        ("statsu a", "unknown command 'statsu'; did you mean 'status'?"),
        ("status --run a", "--join, the address of a peer, is missing"),
        ("sweep a.toml", "missing argument --out DIR: Folder for the runs"),
        ("relay --listen 31330", "--listen must be HOST:PORT, such as 10.0.0.1:29400 or"),
        ("doctor a:1 --timeout 5", "--timeout 5 is not valid: expected a number with us, ms, s, min, h"),
        ("", "usage: diloco"),
        ("evaluate a --text-field body", "--text-field 'body' needs --data PATH"),
        ("train --transport tcp --replica 0", "and --join HOST:PORT, an address"),
        ("train --join 10.0.0.1 --transport tcp", "need each other, got --join 10.0.0.1. Pass --replica 0"),
        ("train --resume .", "there is no config.toml in it"),
        ("train --steps many", "--steps many is not valid: Expected int, got str. See `diloco train --help`."),
        ("train --steps \udcff", "is not valid: 'utf-8' codec can't encode"),
        ("status caf\udce9", "does not exist"),
        ("train --precision \udcff", "is not valid: expected one of float32"),
        ("train x.toml --resume absent", "x.toml cannot be given together with --resume"),
        ("generate a --prompt --json", "For the value --json itself, use --prompt=--json."),
        ("finetune . --data x", "there is no folder '.' with a transformers model"),
        (
            "tokenize book.txt --out a",
            "too many arguments: book.txt; put a flag in front of each. See `diloco tokenize",
        ),
        ("train book.txt", "book.txt cannot be read: No such file or directory. To train on it, use --data book.txt."),
        ("status", "give either the folder of a run or checkpoint, or --run and --join"),
        ("status folder --run a --join b", "give either the folder of a run or checkpoint, or --run and --join"),
        ("status --run a --join b --every 2s --json", "--every keeps the table of --run up to date, without --json"),
        ("status --run a --join b --every 0s", "--every must be a finite number above 0"),
        ("status folder --secret-file x", "--secret-file is the secret of a swarm"),
        ("generate a --chat --json", "--chat can't be combined with --json"),
        ("generate a --system x", "--system needs --chat"),
        ("export a --out b --private", "need --push USER/NAME"),
        ("export a --out b --push name", "--push name must be USER/NAME"),
        (f"plan {SIZE} --step-time 1s --bandwidth 500", "expected a number with kbit, Mbit, Gbit or Tbit"),
        (f"plan {SIZE} --step-time 1s --bandwidth 1Gbit 2Gbit 3Gbit", "has 3 values: give one for all 4 replicas"),
        (
            f"plan {SIZE} --step-time 1s --bandwidth 1Gbit --latency 0ms 1ms",
            "--latency has 2 values: give one",
        ),
        (
            f"plan {SIZE} --step-time 1s --bandwidth 1Gbit --price-per-hour nan",
            "price_per_hour must be a finite",
        ),
        (f"plan {SIZE} --step-time 1s --bandwidth 1Gbit --price-per-gb -1", "of at least 0, got -1"),
        (f"plan {SIZE} --step-time 1s --bandwidth 1Gbit --loss 100%", "--loss must be a percentage below 100"),
    ],
)
def test_misuse_ends_with_2_and_says_what_would_work(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(arguments.split(), capsys)
    assert list(tmp_path.iterdir()) == []


NO_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
LESS = "Use smaller batches, shorter sequences or a smaller model."


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigurationError("bad."), 2, "diloco: bad.\n"),
        (DiLoCoError("failed"), 1, "diloco: failed\n"),
        (MemoryError(), 1, f"diloco: out of memory: MemoryError. {LESS}\n"),
        (RuntimeError(f"{NO_MEMORY} 64 bytes.\nat 1"), 1, f"diloco: out of memory: {NO_MEMORY} 64 bytes. {LESS}\n"),
        (KeyboardInterrupt(), 130, "diloco: interrupted.\n"),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_a_traceback_only_with_debug(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "diloco.cli.plan", types.SimpleNamespace(run_presets=fail))
    assert main(["presets"]) == code
    assert capsys.readouterr().err == words
    assert main(["--debug", "presets"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (not isinstance(error, KeyboardInterrupt))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_sentence_wherever_it_is_met(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python names no file when a write fails, so it was taken for a fault of this package."""

    def fail(arguments: Sequence[str]) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setitem(sys.modules, "diloco.cli.plan", types.SimpleNamespace(run_presets=fail))
    assert main(["presets"]) == 1
    assert capsys.readouterr().err == f"diloco: a file can't be written: {os.strerror(number)}.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"train --resume {'x' * 300}", "xxx can't be used: File name too long."),
        (f"train --init-from {'x' * 300}", "config.json can't be used: File name too long."),
        ("doctor a..b:1", "a..b:1: the name does not resolve: "),
        ("doctor --listen a..b:1", "can't listen on a..b at port 1: "),
    ],
)
def test_a_name_that_the_system_does_not_take_is_a_sentence(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 1
    assert words in capsys.readouterr().err


def python(*code: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.Popen([sys.executable, *code], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


def test_help_presets_and_refusals_import_no_torch() -> None:
    """As that is read when torch is imported; a program of somebody else that calls `main` chooses for itself."""
    code = """
import contextlib, io, os, sys
for name in [name for name in os.environ if name.startswith(("OMP_", "GOMP_"))]:
    del os.environ[name]
from diloco.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    calls = ["--help", "--version", "presets", "train --help", "evaluate --help", "train --codec zip"]
    codes = [main(call.split()) for call in calls]
waiting = [os.environ.get("GOMP_SPINCOUNT")]
sys.argv[1:] = ["--version"]
codes.append(main())
waiting.append(os.environ.get("GOMP_SPINCOUNT"))
assert (codes, waiting) == ([0, 0, 0, 0, 0, 2, 0], [None, "1000"]), (codes, waiting)
print([name for name in ("torch", "tensorboard", "rich", "tokenizers", "pyarrow", "wandb") if name in sys.modules])
"""
    process = python("-c", code)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (0, f"diloco {__version__}\n[]\n", "")


@pytest.mark.parametrize("module", ["diloco.cli", "diloco.terminal", "diloco.cli.plan", "msgspec"])
def test_ctrl_c_during_the_imports_ends_quietly(module: str) -> None:
    code = f"""
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["diloco", "presets"]
runpy.run_module("diloco", run_name="__main__")
"""
    process = python("-c", code)
    _, err = process.communicate()
    assert (process.returncode, err.replace("diloco: interrupted.\n", "")) == (130, "")


def test_a_reader_that_leaves_is_no_error_of_ours() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = python("-m", "diloco", "train", "--help", stdout=writing)
    os.close(writing)
    _, err = process.communicate()
    assert (process.returncode, err) == (1, "")


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Positional[str]
    prompt: Annotated[str, Trait.MAY_BE_EMPTY] = ""
    json: bool = False


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        ("--prompt=--debug", "--debug"),
        ("--debug --prompt x", "x"),
        ("--prompt x --debug", "x"),
        ("--prompt -1", "-1"),
        ("--prompt=", ""),
        ("--json --prompt x --", "x"),
    ],
)
def test_a_prompt_is_taken_as_it_is(words: str, prompt: str) -> None:
    DEBUG.set(False)
    given = parse_options(Options, "generate", ["run", *words.split()])
    assert given.prompt == prompt
    assert DEBUG.get() == ("--debug" in words and prompt == "x")
    DEBUG.set(False)


def test_torchrun_shows_a_refusal_of_all_its_ranks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        (folder := tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))  # as torchrun does
        assert main(["train", "--codec", "zip", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("diloco: There is no codec 'zip'") == 1
    assert not (tmp_path / "run").exists()
