"""Fixtures that several of the transport's test files use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.transport.peers.switchboard import Switchboard
from tests.transport.state_donors import Asker, MakeDonor, an_asker, donors
from tests.transport.swarms import Swarms
from tests.transport.wires import deaf_board


@pytest.fixture
def board() -> Iterator[Switchboard]:
    """A switchboard that hears nobody."""
    with deaf_board(0) as made:
        yield made


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Private keys, which take a second each to make."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture
def swarms(keys: Path) -> Iterator[Swarms]:
    """Makes peers, and ends them."""
    made = Swarms(keys)
    yield made
    made.close()
    gc.collect()  # what Hivemind leaves open is this test's, not one's that comes later


@pytest.fixture
def asker() -> Iterator[Asker]:
    """Somebody who wants a state."""
    yield from an_asker()


@pytest.fixture
def make_donor() -> Iterator[MakeDonor]:
    """Makes those who have one."""
    yield from donors()
