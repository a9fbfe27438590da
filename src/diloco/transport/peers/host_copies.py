"""Copies of payloads from a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from diloco.algorithm import Contribution

__all__ = ["HostCopies"]


class HostCopies:
    """Copies payloads from a GPU to the host, in the order in which they are started. Resources are created lazily."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: ThreadPoolExecutor | None = None

    def start(self, contribution: Contribution) -> tuple[Contribution, torch.cuda.Event]:
        """Return the contribution with its payload in pinned host memory, filled once the event has occurred."""
        payload = contribution.payload
        if payload.device not in self._streams:
            self._streams[payload.device] = torch.cuda.Stream(payload.device)  # type: ignore[no-untyped-call]  # torch's stub
        stream = self._streams[payload.device]
        host = torch.empty(payload.shape, dtype=payload.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(payload.device))
        with torch.cuda.stream(stream):
            host.copy_(payload, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
            copied.record(stream)
        payload.record_stream(stream)  # its memory is not reused before the copy is done
        return replace(contribution, payload=host), copied

    def after(
        self, copied: torch.cuda.Event, act: Callable[[], None], on_error: Callable[[BaseException], object]
    ) -> None:
        """Call ``act`` in another thread once the copy is done, or ``on_error`` if it fails."""
        if self._waiting is None:
            self._waiting = ThreadPoolExecutor(1, thread_name_prefix="diloco-copies")

        def wait() -> None:
            try:
                copied.synchronize()
                act()
            except BaseException as error:
                on_error(error)

        self._waiting.submit(wait)

    def close(self) -> None:
        """Wait for the copies, then end the thread."""
        if self._waiting is not None:
            self._waiting.shutdown()
