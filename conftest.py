"""Hooks that make pytest start faster: it imports only files that have tests or doctests, and the garbage collector
skips every object created before the first test."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Drop the doctest collectors of modules without doctests; pytest would import those modules to search them."""
    found = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text(encoding="utf-8"):
        return [each for each in found if type(each) is pytest.Module]  # keeps test modules, drops doctest modules
    return found


def pytest_collection_finish() -> None:
    gc.freeze()
