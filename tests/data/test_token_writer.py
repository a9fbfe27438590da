"""Where a token folder is written: through links, next to others, and what remains after a failure."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.data import ByteTokenizer, DataSettings, TokenFolder, TokenWriter
from diloco.errors import ConfigurationError
from tests.data.streams import numbered


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number, document in enumerate(numbered(40, longest=200)):
        (folder / f"{number:02}.txt").write_text(document)
    return folder


def of(text: Path) -> DataSettings:
    return DataSettings(paths=(text,), heldout_fraction=0.3)


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """Limit the size of files, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_nothing_is_left(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"tokenize --data {text} --data.heldout-fraction 0.3 --out {tmp_path / 'new' / 'tokens'}"
    with room_for(1000):
        assert main(flags.split()) == 1
    assert "can't be written: [Errno 27] File too large. Give a writable path" in capsys.readouterr().err
    assert not any((tmp_path / "new").iterdir())


@pytest.mark.parametrize("there", [False, True])
def test_who_comes_second_changes_nothing(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "tokens").mkdir()
    first, second = (TokenWriter(tmp_path / "tokens", ByteTokenizer(), 1 << 20) for _ in range(2))

    def write_both() -> None:
        with second.writing({}):
            second.add([("second", False)])
            if there:  # as if the first had checked before the second began
                shutil.move(second.folder, tmp_path / "aside")
            with first.writing({}):
                first.add([("first", False)])
            if there:
                shutil.move(tmp_path / "aside", second.folder)

    with pytest.raises(ConfigurationError, match="tokens already exists and is not an empty folder"):
        write_both()
    assert TokenFolder(tmp_path / "tokens").splits["train"].bytes == len("first")
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert not list((tmp_path / "tokens").glob(".*"))
