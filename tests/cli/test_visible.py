"""Nothing that a command prints is obeyed by a terminal, whoever wrote it; a display's own sequences still work."""

import io
import logging
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.progress_bar import ProgressBar
from rich.text import Text

from diloco import events
from diloco.cli import main
from diloco.errors import DataError
from diloco.monitor import LiveConsole
from tests.cli.runs import describe, train
from tests.monitor.made_events import started

CONTROLS = {
    "escape": "\x1b[2J\x1b[31m",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://evil\x1b\\",
    "bell": "\x07",
    "return": "\rdiloco: all is well",
    "backspace": "\x08\x08",
    "C1": "\x9b2J",
    "delete": "\x7f",
    "bidirectional": "\u202egnp.exe\u2066",
    "line separator": "\u2028",
}
"""What terminals and viewers obey, by kind."""
EVIL = "name " + "".join(CONTROLS.values()) + " [red]end[/red] [/]"


def obeyed(text: str) -> set[str]:
    """Return the characters of a text that are neither printable nor line ends nor tabs."""
    return {each for each in text if not each.isprintable() and each not in "\n\t"}


@pytest.fixture
def run(files: Path, tmp_path: Path) -> Path:
    """A copy of a run whose checkpoint may be changed."""
    shutil.copytree(files / "run", tmp_path / "run")
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    main([str(word) for word in words])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "name \\x1b[2J\\x1b[31m" in text or "name \\u001b[2J\\u001b[31m" in text, text
    assert obeyed(text) == set()
    return text


SAYING: dict[str, Callable[[Path, Path], list[object]]] = {
    "a manifest": lambda run, _: ["status", run],
    "the name of code": lambda run, _: ["generate", run],
    "a prompt": lambda run, files: train(
        files, "--out", str(run / "on"), "--monitor.console", "plain", "--evaluation.sample-prompts", EVIL
    ),
}


@pytest.mark.parametrize("saying", SAYING)
def test_control_characters_of_files_and_arguments_are_shown(
    run: Path, files: Path, capsys: pytest.CaptureFixture[str], saying: str
) -> None:
    about = {"algorithm": EVIL, EVIL: EVIL, "rounds_in_flight": [EVIL], "definition": {"architecture": EVIL}}
    describe(run, {EVIL: EVIL}, **(about if saying == "a manifest" else {"model": {"source": f"{EVIL}.py:build"}}))
    said(capsys, *SAYING[saying](run, files))


def fails(words: str) -> Any:
    raise DataError(words)


ACTIONS: dict[str, Callable[[], object]] = {
    "print": lambda: print(EVIL),
    "print to stderr": lambda: print(EVIL, file=sys.stderr),
    "write lines": lambda: sys.stdout.writelines([EVIL, "\n"]),
    "a log record": lambda: logging.StreamHandler().emit(logging.makeLogRecord({"msg": EVIL})),
    "an error": lambda: fails(EVIL),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_whatever_prints_in_a_command_shows_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """Let a command do it, and fail in ways that need a traceback."""
    command: Any = types.ModuleType("diloco.cli.plan")
    command.run_presets = lambda arguments: (ACTIONS[action](), 0)[1]
    monkeypatch.setitem(sys.modules, command.__name__, command)
    said(capsys, "--debug", "presets")


def test_the_streams_are_as_before_when_a_command_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    for arguments in (["presets"], ["nothing"], ["status", "nowhere"], ["train", "--help"]):
        main(arguments)
        assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_is_shown_on_a_terminal_and_exact_in_a_file(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    prompt = f"a\tb\n{EVIL}"
    assert main(["generate", str(run), "--prompt", prompt, "--tokens", "0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("a\tb\nname \\x1b" if is_terminal else prompt)
    assert (obeyed(text) == set()) == is_terminal


def test_no_cell_of_a_table_poses_as_a_line_of_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(run, {EVIL: EVIL}, algorithm="fine\nchecked  yes", **{"a\nb": "c"}, rounds_in_flight=["x\ny"])
    assert main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith(("checked", "b", "y"))]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_display_draws_and_shows_the_controls_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what others print while it is shown, which it passes on."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    sink = LiveConsole(refresh_s=0.0)
    sink.handle(started(facts={EVIL: EVIL}))
    sink.handle(events.Note(step=1, text=EVIL))
    sink._console.print(Text(EVIL), ProgressBar(10, 5, 20))
    print(EVIL, file=sys.stderr)
    print(EVIL)
    sink.close()
    assert sys.stdout is terminal
    text = terminal.getvalue()
    assert "\x1b[2K" in text  # the display clears its own lines
    assert text.count("\\x1b[2J\\x1b[31m") >= 5
    assert text.count("[red]end[/red] [/]") >= 5
    for kind, controls in CONTROLS.items():
        assert controls not in text, kind
    assert not {"\x07", "\x08", "\x9b", "\x7f", "\u202e"} & set(text)
