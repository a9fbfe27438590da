"""What makes a tester begin sooner: it imports only files with tests or examples, and its garbage collector passes over
all that was there before the first test."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Without modules that have no example: to look for some, pytest would import them."""
    found = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text(encoding="utf-8"):
        return [each for each in found if type(each) is pytest.Module]  # of tests, not of examples
    return found


def pytest_collection_finish() -> None:
    gc.freeze()
