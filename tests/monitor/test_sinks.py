import io
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import ConfigurationError
from diloco.events import Event, Note
from diloco.monitor import MonitorSettings, Sinks, make_sinks, read_metrics


class Recorder:
    """A sink that records its events. It raises an error at step ``fails_at``, or on closing if ``fails_at`` is 0."""

    def __init__(self, fails_at: int = -1) -> None:
        self.steps: list[int] = []
        self.closed, self.fails_at = 0, fails_at

    def handle(self, event: Event) -> None:
        if event.step == self.fails_at:
            raise OSError("no space left")
        self.steps.append(event.step)

    def close(self) -> None:
        self.closed += 1
        if self.fails_at == 0:
            raise OSError("no space left")


def tell(sinks: Sinks, *steps: int) -> None:
    for step in steps:
        sinks.handle(Note(step=step, text="hello"))


def test_a_broken_sink_is_dropped_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    first, broken, last = Recorder(), Recorder(fails_at=2), Recorder()
    sinks = Sinks({"a": first, "metrics.jsonl": broken, "z": last})
    tell(sinks, 1, 2, 3, 2)
    sinks.close()
    assert first.steps == last.steps == [1, 2, 3, 2]
    assert broken.steps == [1]
    assert (first.closed, broken.closed, last.closed) == (1, 1, 1)
    words = "metrics.jsonl failed at step 2 and is no longer written (OSError: no space left); training continues.\n"
    assert capsys.readouterr().err == f"diloco: {words}"


def test_all_are_closed_also_when_one_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    first, broken, last = Recorder(), Recorder(fails_at=0), Recorder()
    sinks = Sinks({"a": first, "b": broken, "z": last})
    sinks.close()
    sinks.close()
    assert (first.closed, broken.closed, last.closed) == (1, 1, 1)
    words = "b could not be closed (OSError: no space left); its last lines may be missing.\n"
    assert capsys.readouterr().err == f"diloco: {words}"


def test_closed_streams_end_their_output_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", Pipe())
    monkeypatch.setattr(sys, "stderr", stream)
    sinks = make_sinks(MonitorSettings(), tmp_path, is_terminal=False)
    tell(sinks, 1, 2)
    sinks.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "is_terminal", "names"),
    [
        ({}, False, ("metrics.jsonl", "the plain output")),
        ({}, True, ("metrics.jsonl", "the progress display")),
        ({"console": "plain", "sinks": ("tensorboard",)}, True, ("tensorboard", "metrics.jsonl", "the plain output")),
        ({"console": "quiet"}, True, ("metrics.jsonl",)),
        ({"console": "json"}, True, ("metrics.jsonl", "the log")),
    ],
)
def test_the_sinks_that_settings_ask_for(
    tmp_path: Path, settings: dict[str, Any], is_terminal: bool, names: tuple[str, ...]
) -> None:
    sinks = make_sinks(MonitorSettings(**settings), tmp_path / "run", is_terminal=is_terminal)
    assert tuple(sinks.sinks) == names
    sinks.close()
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_log_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()  # as little to be written as a file of another user
    with pytest.raises(ConfigurationError, match=r"can't be written: .*metrics\.jsonl"):
        make_sinks(MonitorSettings(), tmp_path, is_terminal=False)


def test_settings_that_cannot_work_are_refused_before_anything_is_written(own: Path) -> None:
    for name, words in (("tensorbord", "did you mean 'tensorboard'"), ("my_sinks:number", "no function or class 'num")):
        with pytest.raises(ConfigurationError, match=words):
            make_sinks(MonitorSettings(sinks=(name,)), own / "run", is_terminal=False)
    assert not (own / "run").exists()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module of the user."""
    (tmp_path / "my_sinks.py").write_text(
        "class Steps:\n"
        "    def __init__(self, folder, name): self.file = (folder / f'{name}.txt').open('w')\n"
        "    def handle(self, event): self.file.write(f'{event.step} ')\n"
        "    def close(self): self.file.close()\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_sink_of_the_users_own_hears_everything(own: Path) -> None:
    settings = MonitorSettings(console="quiet", sinks=("my_sinks:Steps",))
    sinks = make_sinks(settings, own, is_terminal=False, name="anna-pc")
    tell(sinks, 1, 2)
    sinks.close()
    assert (own / "anna-pc.txt").read_text() == "1 2 "
