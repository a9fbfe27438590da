"""For the simulated networks."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from diloco.membership.lateness import Lateness


@pytest.fixture(autouse=True, scope="module")
def one_look() -> Iterator[None]:
    """Who has done nothing from one look to the next is late: each time that is over says so."""
    with mock.patch.object(Lateness, "LOOKS", 1):
        yield
