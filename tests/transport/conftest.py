"""Fixtures that several of the transport's test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco.transport.torch_distributed.switchboard import Switchboard, Timing


@pytest.fixture
def board() -> Iterator[Switchboard]:
    """A switchboard that hears nobody."""
    made = Switchboard(0, Timing(), lambda *_: None, lambda *_: None)
    yield made
    made.close()
