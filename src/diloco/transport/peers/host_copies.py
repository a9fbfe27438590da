"""Payloads from a CUDA device to the host, on a stream of their own and waited for by another thread than training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from diloco.algorithm.averaging import Contribution

__all__ = ["HostCopies"]


class HostCopies:
    """Copies in the order in which they are started. Nothing is made before the first one."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._waiting: ThreadPoolExecutor | None = None

    def start(self, contribution: Contribution) -> tuple[Contribution, torch.cuda.Event]:
        """The contribution with its payload in pinned host memory, filled once the event has come."""
        payload = contribution.payload
        if self._stream is None:
            self._stream = torch.cuda.Stream(payload.device)  # type: ignore[no-untyped-call]  # torch's stub
        host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(payload.device))
        with torch.cuda.stream(self._stream):
            host.copy_(payload, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
            copied.record(self._stream)
        payload.record_stream(self._stream)  # its memory is not given away before the copy is done
        return replace(contribution, payload=host), copied

    def after(self, copied: torch.cuda.Event, act: Callable[[], None]) -> None:
        """Call ``act`` in another thread when the copy is done."""
        if self._waiting is None:
            self._waiting = ThreadPoolExecutor(1, thread_name_prefix="diloco-copies")

        def wait() -> None:
            copied.synchronize()
            act()

        self._waiting.submit(wait)

    def close(self) -> None:
        """Wait for the copies and end the thread."""
        if self._waiting is not None:
            self._waiting.shutdown()
