"""Standard streams that are closed, full or ASCII: no traceback, and an exit code for the work that was done."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.terminal import as_typed

SMALL = {
    "--steps": "2",
    "--inner-steps": "2",
    "--model.arguments.layers": "1",
    "--model.arguments.width": "32",
    "--model.arguments.heads": "2",
    "--batch-size": "2",
    "--sequence-length": "32",
    "--out": "run",
}


def closing(*numbers: int) -> Callable[[], None]:
    """Return what closes standard streams in a child process."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


def full(*numbers: int) -> Callable[[], None]:
    """Return what lets standard streams of a child process end on a full disk."""

    def fill() -> None:
        for number in numbers:
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)

    return fill


def run(
    arguments: list[str], prepare: Callable[[], None], place: Path, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "diloco", *arguments]
    return subprocess.run(command, capture_output=True, cwd=place, preexec_fn=prepare, env=os.environ | environment)


BROKEN: dict[str, tuple[str, Callable[[], None], int, bytes]] = {
    "closed input": ("presets", closing(0), 0, b""),
    "closed output": ("presets", closing(1), 0, b""),
    "closed errors": ("trian", closing(2), 2, b""),
    "full output": ("presets", full(1), 1, b"diloco: the output cannot be written: No space left on device.\n"),
    "full errors": ("trian", full(2), 2, b""),
    "full output and errors": ("presets", full(1, 2), 1, b""),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_stream_ends_in_an_exit_code(kind: str, tmp_path: Path) -> None:
    command, prepare, code, errors = BROKEN[kind]
    done = run([command], prepare, tmp_path)
    assert (done.returncode, done.stderr) == (code, errors)


def test_training_goes_on_without_its_output(tmp_path: Path) -> None:
    done = run(["train", *(word for pair in SMALL.items() for word in pair)], closing(0, 1, 2), tmp_path)
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"StepFinished"') == 2


def test_characters_that_a_stream_lacks_are_escaped(tmp_path: Path) -> None:
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "import sys; sys.argv[1:] = ['caf\\u00e9']; from diloco.cli import main; sys.exit(main())"
    spoken = "from diloco.cli import make_streams_safe as make; make(); print('caf\\u00e9 \\udcff', input())"
    for source, expected in ((code, (2, b"")), (spoken, (0, b"caf\\xe9 \\udcff \\u6771\n"))):
        done = subprocess.run(
            [sys.executable, "-c", source],
            input="東\n".encode(),
            capture_output=True,
            cwd=tmp_path,
            env=os.environ | environment,
        )
        assert (done.returncode, done.stdout) == expected
        assert b"Traceback" not in done.stderr


def test_a_prompt_is_what_was_typed_in_any_locale(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert as_typed("caf\udcc3\udca9 \u6771") == "café 東"
    for option in ("--prompt", "--system"):
        assert main(["generate", str(tmp_path), option, "\udcff", *(["--chat"] if option == "--system" else [])]) == 2
        assert "'\\udcff' is not text in UTF-8" in capfd.readouterr().err


def test_a_name_that_no_settings_file_can_hold_is_refused(tmp_path: Path) -> None:
    done = run(["train", "--data", "caf\udce9.jsonl"], lambda: None, tmp_path)
    assert (done.returncode, done.stdout, b"Traceback" in done.stderr) == (2, b"", False)
    assert b"caf\\udce9.jsonl" in done.stderr
