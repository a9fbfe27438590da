"""The ``monitor`` section of the settings: what a run prints and writes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from diloco.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What a run prints and writes while it trains."""

    console: Annotated[Literal["auto", "plain", "json", "quiet"], arg(aliases=["--log"])] = "auto"
    """auto: a live display on a terminal, else plain (a row each ten steps); json: lines on stderr."""
    prometheus: str | None = None
    """Port at which the run answers /metrics (for Prometheus) and /healthz (for orchestrators), on this machine alone;
    HOST:PORT: on that interface, to everybody who reaches it. Of several processes that one command starts, each takes
    a further port. Needs pip install 'diloco[monitor]'."""
    sinks: Annotated[tuple[str, ...], arg(aliases=["--sinks"])] = ()
    """Further sinks: tensorboard, wandb (pip install 'diloco[monitor]'), or MODULE:NAME or FILE.py:NAME of your own,
    which takes the run folder."""

    def __post_init__(self) -> None:
        if self.prometheus is not None:
            self.metrics_address()

    def metrics_address(self) -> tuple[str, int]:
        """Return host and port of monitor.prometheus, which must be set."""
        host, _, port = (self.prometheus or "").rpartition(":")
        if not (port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16):
            raise ConfigurationError(f"monitor.prometheus must be PORT or HOST:PORT, got {self.prometheus!r}.")
        return host.strip("[]") or "127.0.0.1", int(port)
