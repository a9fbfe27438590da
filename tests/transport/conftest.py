"""Fixtures that several of the transport's test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco.transport.peers.switchboard import Switchboard, Timing
from diloco.transport.torch_distributed.tcp_streams import TcpStreams


@pytest.fixture
def board() -> Iterator[Switchboard]:
    """A switchboard that hears nobody."""
    made = Switchboard(0, Timing(), lambda *_: None, lambda *_: None, TcpStreams())
    yield made
    made.close()
