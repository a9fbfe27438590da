"""Fixtures that several of the transport's test files use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.relays import Relays, relayed
from tests.transport.swarms import Swarms
from tests.transport.wires import Wires


@pytest.fixture
def wires() -> Iterator[Wires]:
    """Makes ranks that are connected over TCP and closes them."""
    made = Wires()
    yield made
    made.close()


@pytest.fixture
def relays(wires: Wires) -> Iterator[Relays]:
    """Relays in all connections of the test's transports."""
    with relayed() as relays:
        yield relays
        wires.close()


@pytest.fixture
def swarms(keys: Path) -> Iterator[Swarms]:
    """Makes peers and ends them."""
    made = Swarms(keys)
    yield made
    made.close()
    gc.collect()  # so that warnings about what Hivemind leaves open appear in this test


@pytest.fixture(scope="module")
def lasting(keys: Path) -> Iterator[Swarms]:
    """Makes peers that several tests share, and ends them."""
    made = Swarms(keys)
    yield made
    made.close()
    gc.collect()
