"""Standard streams that are closed, full or ASCII: no traceback, and an exit code for the work that was done."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.terminal import as_typed
from tests.cli.runs import train
from tests.processes import Processes


def streams(*, closed: Sequence[int] = (), full: Sequence[int] = ()) -> Callable[[], None]:
    """Return what closes standard streams of a child process, or lets them end on a full disk."""

    def prepare() -> None:
        for number in closed:
            os.close(number)
        for number in full:
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)

    return prepare


def run(arguments: list[str], prepare: Callable[[], None], place: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "diloco", *arguments]
    return subprocess.run(command, capture_output=True, cwd=place, preexec_fn=prepare)


@pytest.mark.parametrize(
    ("command", "prepare", "code", "errors"),
    [
        ("presets", streams(closed=[1]), 0, b""),
        ("trian", streams(closed=[2]), 2, b""),
        ("presets", streams(full=[1]), 1, b"diloco: the output cannot be written: No space left on device.\n"),
        ("presets", streams(full=[1, 2]), 1, b""),
    ],
    ids=["closed output", "closed errors", "full output", "full output and errors"],
)
def test_a_broken_stream_ends_in_an_exit_code(
    command: str, prepare: Callable[[], None], code: int, errors: bytes, tmp_path: Path
) -> None:
    done = run([command], prepare, tmp_path)
    assert (done.returncode, done.stderr) == (code, errors)


def without_streams(rank: int, words: list[str]) -> int:
    """Run a command where all three are closed, which Python then does not have."""
    streams(closed=[0, 1, 2])()
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]  # as at the start of a process
    sys.argv = ["diloco", *words]
    return main()


def test_training_goes_on_without_its_output(files: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(1, without_streams, train(files, "--steps", "2", "--out", str(tmp_path / "run")))
        assert processes.results() == {0: 0}
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
    for words in (["--prompt", "\udcff"], ["--chat", "--system", "\udcff"]):
        assert main(["generate", str(tmp_path), *words]) == 2
        assert "'\\udcff' is not text in UTF-8" in capfd.readouterr().err


def test_a_name_that_no_settings_file_can_hold_is_refused(tmp_path: Path) -> None:
    done = run(["train", "--data", "caf\udce9.jsonl"], streams(), tmp_path)
    assert (done.returncode, done.stdout, b"Traceback" in done.stderr) == (2, b"", False)
    assert b"caf\\udce9.jsonl" in done.stderr
