"""The sinks of a run, combined so that an error in one of them affects neither the run nor the other sinks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.errors import ConfigurationError, nearest
from diloco.events import Event, Sink
from diloco.monitor.console import LiveConsole, PlainConsole
from diloco.monitor.metrics_file import MetricsFile
from diloco.monitor.settings import MonitorSettings
from diloco.monitor.trackers import TRACKERS
from diloco.plugins import call, is_own, takes


class Sinks:
    """Passes every event to every sink. A sink that raises is dropped with a message, and the others continue.

    Args:
        sinks: name -> sink; messages use the name.
    """

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sinks that have not failed."""
        return tuple(self._sinks)

    def handle(self, event: Event) -> None:
        """Pass ``event`` to every sink. Only exceptions that stop the process, such as KeyboardInterrupt, propagate."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.handle(event)
            except Exception as error:
                del self._sinks[name]
                with contextlib.suppress(Exception):  # it has just failed, and would report the same error again
                    sink.close()
                _print(f"{name} failed at step {event.step} and is no longer written", error, "training continues.")

    def close(self) -> None:
        """Close every sink, even if closing one of them fails. A second call does nothing."""
        while self._sinks:
            name, sink = self._sinks.popitem()
            try:
                sink.close()
            except Exception as error:
                _print(f"{name} could not be closed", error, "its last lines may be missing.")


def make_sinks(
    settings: MonitorSettings,
    folder: Path,
    *,
    is_terminal: bool,
    config: Mapping[str, Any] | None = None,
    name: str = "",
    group: str | None = None,
) -> Sinks:
    """Create the sinks that ``settings`` ask for: a console, ``metrics.jsonl``, trackers and the user's own.

    Args:
        folder: the run folder, which is created if it does not exist.
        is_terminal: whether standard output is a terminal with cursor movement.
        config: the settings of the run by section, for trackers.
        name: what a tracker calls this process. Default: the name of the folder.
        group: what a tracker calls all processes of the run, if there are several.

    Raises:
        ConfigurationError: if a setting cannot work. Nothing has been written then.
    """
    kind = settings.console
    if kind == "live" and not is_terminal:
        raise ConfigurationError(
            'monitor.console="live" needs a terminal, but standard output is not one. Use "plain", or "auto" to choose '
            "automatically."
        )
    offered = {"config": config or {}, "name": name or folder.resolve().name, "group": group}
    sinks = {text: _make_sink(text, folder, offered) for text in settings.sinks}
    sinks["metrics.jsonl"] = MetricsFile(folder / "metrics.jsonl")
    if kind == "live" or (kind == "auto" and is_terminal):
        sinks["the progress display"] = LiveConsole(verbose=settings.verbose)
    elif kind != "quiet":
        sinks["the plain output"] = PlainConsole(every_steps=settings.every_steps, verbose=settings.verbose)
    return Sinks(sinks)


def _make_sink(text: str, folder: Path, offered: Mapping[str, Any]) -> Sink:
    """Make the sink that ``monitor.sinks`` names; it gets those of the offered arguments that it takes."""
    if is_own(text):
        sink: Sink = call("monitor.sinks", text, folder, kind=Sink, arguments={}, offered=offered)
        return sink
    if text not in TRACKERS:
        raise ConfigurationError(
            f"monitor.sinks={text!r} is unknown; {nearest(text, TRACKERS)} Your own is MODULE:NAME or FILE.py:NAME."
        )
    kind: Any = TRACKERS[text]
    made: Sink = kind(folder, **{name: value for name, value in offered.items() if takes(kind, name)})
    return made


def _print(what: str, error: Exception, then: str) -> None:
    """Print a message to stderr. It never raises, unlike `warnings` under ``-W error``."""
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    with contextlib.suppress(Exception):
        print(f"{what} ({why}); {then}", file=sys.stderr, flush=True)
