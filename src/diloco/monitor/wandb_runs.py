"""Runs at Weights & Biases.

Everything that wandb does happens in a thread of its own: training never waits for its server, slow or gone. What could
not be sent stays in the run folder, for ``wandb sync``.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diloco import events
from diloco.errors import ConfigurationError, from_extra
from diloco.monitor.files import Curves
from diloco.monitor.settings import WandbSettings
from diloco.monitor.sinks import say

__all__ = ["WandbSink", "run_id"]

LONGEST_START_S = 60.0
MOST_WAITING = 10_000  # points that may wait for wandb to take them: a few megabytes, far more than a server's bad hour

_Write = Callable[[Any], None]


class WandbSink:
    """The `Curves` of a run, evaluations, samples (a table each), summary and settings, at Weights & Biases.

    The axis is the inner step. A run that goes on is the same run there, by the identifier in ``folder``/wandb/id;
    steps that it repeats are there already, and are skipped. If the server can't be reached at the start, the run is
    written as in mode offline, and says so.

    Args:
        settings: with a mode other than off.
        folder: of the run; wandb's own files go to its subfolder wandb.
        every_steps: steps between two points, unless the settings have a number.
        config: the settings of the run by section.

    Raises:
        ConfigurationError: if wandb can't be imported, or has no API key in mode online.
    """

    def __init__(
        self,
        settings: WandbSettings,
        folder: Path,
        *,
        every_steps: int,
        config: Mapping[str, Any],
    ) -> None:
        self._wandb = _load_wandb(settings.mode)
        self._settings = settings
        self._folder = folder
        self._curves = Curves(settings.every_steps or every_steps)
        self._config = config
        self._writes: queue.Queue[_Write | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._exit_code = 1  # until the run says that it is over

    def handle(self, event: events.Event) -> None:
        """Queue ``event`` for the thread that writes it.

        Raises:
            Exception: what wandb raised, or that it no longer takes anything; the run is not written further then.
        """
        if self._error is not None:
            raise self._error
        if isinstance(event, events.RunStarted):
            self._thread = threading.Thread(target=self._work, args=(event,), name="diloco-wandb", daemon=True)
            self._thread.start()
        if (point := self._curves.take(event)) is not None:
            step, values = point
            if isinstance(event, events.Evaluated):
                values |= {"loss/heldout(perplexity)": event.perplexity, "loss/heldout(bits/byte)": event.bits_per_byte}
            self._put(lambda run: run.log(values, step=step))
        if isinstance(event, events.SampleGenerated):
            row = [event.step, event.prompt, event.text]
            table = self._wandb.Table
            self._put(lambda run: run.log({"sample": table(["step", "prompt", "text"], [row])}, step=event.step))
        elif isinstance(event, events.RunFinished):
            summary = dict(event.summary)
            self._exit_code = 130 if summary.get("interrupted") else 0
            self._put(lambda run: run.summary.update(summary))

    def close(self) -> None:
        """End the run there, waiting no longer than the settings allow.

        Raises:
            TimeoutError: if not everything could be sent in that time.
        """
        if self._thread is None or self._error is not None:
            return
        if (point := self._curves.rest()) is not None:
            step, values = point
            self._put(lambda run: run.log(values, step=step))
        self._put(None)
        self._thread.join(self._settings.finish_timeout_s + 5)
        if self._thread.is_alive():
            raise TimeoutError(
                f"not everything was sent in {self._settings.finish_timeout_s:g} s; "
                f"`wandb sync --include-online` in {self._folder} sends the rest"
            )
        if self._error is not None:
            raise self._error

    def _put(self, write: _Write | None) -> None:
        try:
            self._writes.put_nowait(write)
        except queue.Full:
            self._error = RuntimeError(f"{MOST_WAITING:,} points are waiting and wandb takes none")
            raise self._error from None

    def _work(self, started: events.RunStarted) -> None:
        try:
            run = self._begin(started)
            while (write := self._writes.get()) is not None:
                write(run)
            run.finish(exit_code=self._exit_code)
        except Exception as error:
            self._error = error

    def _begin(self, started: events.RunStarted) -> Any:
        if self._settings.mode == "offline":
            return self._open("offline", started)
        try:
            run = self._open("online", started)
            say(f"W&B shows this run at {run.url}")
            return run
        except Exception as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            say(
                f"W&B can't be reached ({why}); the run is written to {self._folder / 'wandb'} instead, from where "
                "`wandb sync` sends it. Training goes on."
            )
            self._wandb.teardown()  # otherwise its service keeps the identifier of the run that could not begin
            return self._open("offline", started)

    def _open(self, mode: str, started: events.RunStarted) -> Any:
        settings = self._settings
        run = {name: getattr(started, name) for name in ("num_replicas", "parameters", "tokens_per_step")}
        return self._wandb.init(
            mode=mode,
            dir=str(self._folder),
            id=run_id(self._folder),
            resume="allow",
            project=settings.project,
            entity=settings.entity,
            name=settings.name or self._folder.resolve().name,
            group=settings.group,
            tags=list(settings.tags),
            config={**events.json_ready(self._config), "run": run, "facts": dict(started.facts)},
            allow_val_change=True,  # some settings may change when a run goes on
            reinit="create_new",  # a run of the surrounding program stays as it is
            settings=self._wandb.Settings(
                console="off",  # the progress display is not for a log
                silent=True,
                init_timeout=LONGEST_START_S,
                finish_timeout=settings.finish_timeout_s,
            ),
        )


def run_id(folder: Path) -> str:
    """The identifier of the run in ``folder``, created if there is none yet."""
    path = folder / "wandb" / "id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(6) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _load_wandb(mode: str) -> Any:
    with from_extra("wandb", f"monitor.wandb.mode={mode!r} needs wandb"):
        import wandb
    if mode == "online" and not _has_key(wandb.setup().settings):
        raise ConfigurationError(
            "monitor.wandb.mode='online' needs an API key: use `wandb login`, WANDB_API_KEY, or mode 'offline'."
        )
    return wandb


def _has_key(settings: Any) -> bool:
    """Whether wandb can find credentials, without asking its server or the user."""
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    hosts = (urlsplit(str(settings.base_url)).netloc, "api.wandb.ai")  # the second also for its newer names
    files = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            entries = netrc.netrc(file)
            if any(entries.authenticators(host) for host in hosts):
                return True
    return False
