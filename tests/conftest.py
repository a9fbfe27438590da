"""Setup and fixtures of all tests.

Torch uses one thread and Hypothesis examples have no deadline, so that bits and times do not depend on the number of
free cores. SIGINT is handled, also in a background job, which inherits that it is ignored. `os.fsync` does nothing,
because only a power loss would show the difference; a test of its own checks the calls.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
signal.signal(signal.SIGINT, signal.default_int_handler)
os.fsync = lambda descriptor: None


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of short documents with a learnable structure. Tests must not change it."""
    from tests.runs import write_text  # a late import, because it imports all training code

    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for private keys, shared because generating one takes a second."""
    return tmp_path_factory.mktemp("keys")
