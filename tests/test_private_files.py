"""What the package creates beside the user's own files is its owner's alone, whatever the umask."""

import os
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.private_files import make_private_folder, replace_private
from diloco.transport import Credentials
from tests.cli.runs import SMALL
from tests.transport.swarms import HIVEMIND_LEAVES_CONNECTIONS, Swarms, streams_of


@contextmanager
def under(umask: int = 0) -> Iterator[None]:
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(path: Path, top: Path) -> bool:
    """Return whether another user who can enter ``top`` can do anything with ``path``."""
    closed = (each.stat().st_mode & 0o077 == 0 for each in (path, *path.parents) if each != top and top in each.parents)
    return not any(closed)


@HIVEMIND_LEAVES_CONNECTIONS
def test_nobody_else_can_use_the_sockets_of_the_daemon(keys: Path) -> None:
    """Over its control socket anyone could open streams as this peer."""
    with under():
        swarms = Swarms(keys)
        daemon = streams_of(swarms.meet(1)[0]).node.daemon_pid
        arguments = Path(f"/proc/{daemon}/cmdline").read_text("utf-8").split("\0")
        control = Path(next(each.partition("/unix")[2] for each in arguments if each.startswith("-listen=")))
        sockets = [path for path in control.parent.iterdir() if path.is_socket()]
        exposed = [path for path in sockets if open_to_others(path, Path("/tmp"))]
        swarms.close()
    assert control in sockets
    assert not exposed
    assert not control.parent.exists()


def test_nobody_else_can_read_what_a_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records hold samples of the data and paths of this machine. Whoever can write there changes the model."""
    monkeypatch.chdir(tmp_path)
    top = tmp_path / "home"
    top.mkdir()
    (tmp_path / "run.toml").write_text(SMALL)
    (tmp_path / "text.jsonl").write_text(
        "".join(f'{{"text": "sentence number {number} of a text"}}\n' for number in range(200))
    )
    with under():
        assert main(["train", "run.toml", "--data", "text.jsonl", "--out", str(top / "new" / "run")]) == 0
    written = list(top.rglob("*"))
    assert {"config.toml", "metrics.jsonl", "summary.json"} <= {path.name for path in written}
    assert not [path for path in written if open_to_others(path, top)]


def test_the_key_of_connections_is_in_no_file_that_others_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encrypted too, because a process that is killed at that moment leaves the file behind."""
    modes: list[int] = []
    texts: list[bytes] = []
    before = ssl.SSLContext.load_cert_chain

    def note(self: ssl.SSLContext, path: Path, password: bytes) -> None:
        modes.extend(stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent))
        texts.append(path.read_bytes())
        before(self, path, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", note)
    with under():
        Credentials("test", "")
    assert modes == [0o600, 0o700] * 2
    assert all(b"BEGIN ENCRYPTED PRIVATE KEY" in each and b"BEGIN PRIVATE KEY" not in each for each in texts)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_missing_folders_are_private_and_existing_ones_stay_as_they_are(tmp_path: Path, umask: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    with under(umask):
        for _ in range(2):
            make_private_folder(shared / "a" / "b")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (shared, shared / "a", shared / "a" / "b")]
    assert modes == [0o775, 0o700, 0o700]
    (shared / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_folder(shared / "file")


def test_a_private_file_that_can_not_be_replaced_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_private(tmp_path / "key", b"secret")
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
