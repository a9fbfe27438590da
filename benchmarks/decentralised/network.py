"""The loopback interface, in the place of an emulated network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.wan.network import Network
from benchmarks.wan.plan import Link

__all__ = ["Loopback"]


class Loopback(Network):
    """All peers on this machine, as they are."""

    device = "lo"

    def __init__(self) -> None:
        self.environment = dict(os.environ)

    @contextmanager
    def up(self, link: Link) -> Iterator[None]:
        yield

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        return list(arguments)

    def sent_bytes(self, node: int) -> int:
        """All peers share the interface, so what one has sent can't be told."""
        return 0
