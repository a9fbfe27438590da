"""Fixtures that several test files of the command line use."""

from pathlib import Path

import pytest

from diloco.cli import main
from tests.cli.runs import SMALL, write_documents


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``run.toml``, its training text, and ``run``, a run that was stopped after step 6 of 8."""
    folder = tmp_path_factory.mktemp("cli")
    write_documents(folder)
    (folder / "run.toml").write_text(SMALL)
    done = main(["train", str(folder / "run.toml"), "--data", str(folder / "text.jsonl"), "--out", str(folder / "run"),
                 "--stop-after", "6"])  # fmt: skip
    assert done == 0
    return folder
