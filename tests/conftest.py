"""Shared by all tests: one thread of torch and examples without a deadline, so that bits and times do not depend on how
many cores are free; no waiting for the disk, which only a loss of power would tell apart (what is asked of it, and
when, has a test of its own); a text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
os.fsync = lambda descriptor: None


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl of short documents with something to learn in them; not to be changed."""
    from tests.runs import write_text  # which imports all that trains

    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for private keys, which take a second each to make."""
    return tmp_path_factory.mktemp("keys")
