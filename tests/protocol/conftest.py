"""Fixtures for the simulated networks."""

from collections.abc import Iterator
from unittest import mock

import pytest

from diloco.protocol import Rules


@pytest.fixture(autouse=True, scope="module")
def one_look() -> Iterator[None]:
    """Make a replica late after one look without a change, so that a single timer is enough."""
    with mock.patch.object(Rules, "LOOKS", 1):
        yield
