"""Hooks that make tests faster: pytest imports only files that have tests or doctests, the garbage collector skips what
was created before the first test, and one server forks processes for all test processes. One hook ends what hangs."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import start_server, use_server

STDERR = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Drop the doctest collectors of modules without doctests; pytest would import those modules to search them."""
    found = yield
    if file_path.suffix == ".py" and ">>> " not in file_path.read_text(encoding="utf-8"):
        return [each for each in found if type(each) is pytest.Module]  # keeps test modules, drops doctest modules
    return found


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist, in the process that starts the test processes. The server takes ten seconds to import."""
    if sys.platform == "linux":
        node.workerinput["server"] = start_server()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # not yet captured
    if server := getattr(config, "workerinput", {}).get("server"):
        use_server(*server)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Begin the time limit anew. A failure ends that of a test, and a fixture that hung then held up all for hours."""
    faulthandler.dump_traceback_later(
        float(item.config.getini("faulthandler_timeout")), file=item.config.stash[STDERR], exit=True
    )
