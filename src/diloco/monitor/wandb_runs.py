"""The sink that sends a run to Weights & Biases.

All calls to wandb run in a separate thread, so that training never waits for its server. Data that could not be sent
stays in the run folder, for ``wandb sync``.
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
from diloco.monitor.sinks import print_message
from diloco.monitor.wording import exit_code

__all__ = ["WandbSink", "run_id"]

LONGEST_START_S = 60.0
MOST_WAITING = 10_000  # the most points in the queue to wandb: a few megabytes, far more than an hour's outage needs

_Write = Callable[[Any], None]


class WandbSink:
    """Sends the `Curves` of a run, its evaluations, samples (a table each), summary and settings to Weights & Biases.

    The x axis is the inner step. A resumed run continues the same W&B run, which the identifier in
    ``folder``/wandb/id names; W&B already has the steps that it repeats and skips them. If the server can't be reached
    at the start, the run is written as in mode offline, with a message.

    Args:
        settings: the settings, with a mode other than off.
        folder: the run folder; wandb writes its files to the subfolder wandb.
        every_steps: steps between two points, unless the settings give a number.
        config: the settings of the run by section.

    Raises:
        ConfigurationError: if wandb can't be imported, or if mode is online and there is no API key.
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
        self._exit_code = 1  # until `RunFinished` arrives

    def handle(self, event: events.Event) -> None:
        """Queue ``event`` for the writing thread.

        Raises:
            Exception: the error that wandb raised in that thread.
            RuntimeError: if the queue is full. Nothing more is written after either error.
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
            self._exit_code = exit_code(summary)
            self._put(lambda run: run.summary.update(summary))

    def close(self) -> None:
        """Finish the W&B run, waiting at most about ``finish_timeout_s``.

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
                f"some data was not sent within {self._settings.finish_timeout_s:g} s; run "
                f"`wandb sync --include-online` in {self._folder} to send the rest"
            )
        if self._error is not None:
            raise self._error

    def _put(self, write: _Write | None) -> None:
        try:
            self._writes.put_nowait(write)
        except queue.Full:
            self._error = RuntimeError(f"the queue to wandb is full, with {MOST_WAITING:,} points")
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
            print_message(f"View this run on W&B: {run.url}")
            return run
        except Exception as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            print_message(
                f"W&B can't be reached ({why}), so the run is written to {self._folder / 'wandb'} instead. Upload it "
                "later with `wandb sync`. Training continues."
            )
            self._wandb.teardown()  # otherwise wandb's service still holds the identifier of the run that failed
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
            allow_val_change=True,  # some settings may change when a run is resumed
            reinit="create_new",  # leaves a W&B run of the surrounding program alone
            settings=self._wandb.Settings(
                console="off",  # don't record the progress display
                silent=True,
                init_timeout=LONGEST_START_S,
                finish_timeout=settings.finish_timeout_s,
            ),
        )


def run_id(folder: Path) -> str:
    """Return the W&B identifier of the run in ``folder``, creating one if there is none yet."""
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
            "monitor.wandb.mode='online' needs an API key. Run `wandb login`, set WANDB_API_KEY, or use mode 'offline'."
        )
    return wandb


def _has_key(settings: Any) -> bool:
    """Return whether wandb can find credentials without asking its server or the user."""
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    # a key stored for api.wandb.ai is valid for newer host names of W&B, too
    hosts = (urlsplit(str(settings.base_url)).netloc, "api.wandb.ai")
    files = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            entries = netrc.netrc(file)
            if any(entries.authenticators(host) for host in hosts):
                return True
    return False
