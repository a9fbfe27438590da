"""Fixtures that several of the transport's test files use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.transport import ConnectionManager
from tests.transport.connection_managers import MakeRank, Rank, makes
from tests.transport.state_donors import Donor, Fetcher, MakeDonor
from tests.transport.swarms import Swarms
from tests.transport.wires import Wires, deaf_manager


@pytest.fixture
def connections() -> Iterator[ConnectionManager]:
    """A connection manager that ignores all messages."""
    with deaf_manager(0) as made:
        yield made


@pytest.fixture
def make_rank() -> Iterator[MakeRank]:
    """Makes connection managers that record the messages they receive."""
    yield from makes(Rank)


@pytest.fixture
def wires() -> Iterator[Wires]:
    """Makes ranks of a torch transport and closes them."""
    made = Wires()
    yield made
    made.close()


@pytest.fixture
def swarms(keys: Path) -> Iterator[Swarms]:
    """Makes peers and ends them."""
    made = Swarms(keys)
    yield made
    made.close()
    gc.collect()  # so that warnings about what Hivemind leaves open appear in this test


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    """A replica that fetches a state."""
    made = Fetcher()
    yield made
    made.close()


@pytest.fixture
def make_donor() -> Iterator[MakeDonor]:
    """Makes replicas that serve a state."""
    yield from makes(Donor)
