"""All sinks of a run as one. An error in one of them harms neither the run nor the others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError
from diloco.events import Event, Sink
from diloco.monitor.settings import MonitorSettings
from diloco.plugins import find

__all__ = ["Sinks", "make_sinks", "say"]


class Sinks:
    """Hands every event to every sink. A sink that raises is dropped, which is said once; the others go on.

    Args:
        sinks: by the name to use in that sentence.

    >>> class Broken:
    ...     def handle(self, event): raise OSError("no space left on device")
    ...     def close(self): pass
    >>> from diloco.events import Note
    >>> sinks = Sinks({"metrics.jsonl": Broken()})
    >>> with contextlib.redirect_stderr(sys.stdout):
    ...     sinks.handle(Note(step=1, text="hello"))
    ...     sinks.handle(Note(step=2, text="not said twice"))
    metrics.jsonl failed at step 1 and is no longer written (OSError: no space left on device); training goes on.
    """

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sinks that still listen."""
        return tuple(self._sinks)

    def handle(self, event: Event) -> None:
        """Hand ``event`` on; raises nothing but what stops the process, such as KeyboardInterrupt."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.handle(event)
            except Exception as error:
                self._drop(name, sink, event.step, error)

    def close(self) -> None:
        """Close every sink, also when one of them cannot; a second call does nothing."""
        while self._sinks:
            name, sink = self._sinks.popitem()
            try:
                sink.close()
            except Exception as error:
                say(f"{name} could not be closed ({_words(error)}); its last lines may be missing.")

    def _drop(self, name: str, sink: Sink, step: int, error: Exception) -> None:
        del self._sinks[name]
        with contextlib.suppress(Exception):  # it has just failed; what closing says would be an echo
            sink.close()
        say(f"{name} failed at step {step} and is no longer written ({_words(error)}); training goes on.")


def make_sinks(
    settings: MonitorSettings, folder: Path, *, is_terminal: bool, config: Mapping[str, Any] | None = None
) -> Sinks:
    """The sinks that ``settings`` ask for: a console, ``folder``/metrics.jsonl, ``folder``/tensorboard, trackers.

    Args:
        folder: of the run; created if it does not exist.
        is_terminal: whether the standard output is a terminal that can move its cursor.
        config: the settings of the run by section, for trackers.

    Raises:
        ConfigurationError: for settings that cannot work, before anything is written.
    """
    kind = settings.console
    if kind == "live" and not is_terminal:
        raise ConfigurationError(
            'monitor.console="live" needs a terminal, which the output is not. Use "plain", or "auto", which chooses '
            "by itself."
        )
    from diloco.monitor.console import LiveConsole, PlainConsole
    from diloco.monitor.files import MetricsFile, TensorBoardSink

    makers = {name: find("monitor.sinks", name) for name in settings.sinks}
    sinks: dict[str, Sink] = {}
    if settings.wandb.mode != "off":
        from diloco.monitor.wandb_runs import WandbSink

        sinks["W&B"] = WandbSink(settings.wandb, folder, every_steps=settings.every_steps, config=config or {})
    for name, make in makers.items():
        sinks[name] = make(folder)
    if settings.tensorboard:
        sinks["TensorBoard"] = TensorBoardSink(folder / "tensorboard", settings.every_steps)
    sinks["metrics.jsonl"] = MetricsFile(folder / "metrics.jsonl")
    if kind == "live" or (kind == "auto" and is_terminal):
        sinks["the progress display"] = LiveConsole()
    elif kind != "quiet":
        sinks["the plain output"] = PlainConsole(every_steps=settings.every_steps)
    return Sinks(sinks)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def say(sentence: str) -> None:
    """Tell the user; raises nothing, unlike `warnings` under ``-W error``."""
    with contextlib.suppress(Exception):
        print(sentence, file=sys.stderr, flush=True)
