"""Secrets and private keys: which files are accepted, and what is derived from them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.errors import ConfigurationError
from diloco.private_files import create_private
from diloco.transport import Address, Admission, derive_key, load_identity, new_secret, read_secret
from tests.transport.nowhere import place

SECRET = new_secret()
NAME = "network.secret_file"


def proof_of(secret: str) -> bytes:
    return derive_key("test", secret)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "run.secret"
    create_private(path, content)
    return path


@pytest.mark.parametrize("form", [b"%s\n", b"%s", b"%s\r\n", b"\xef\xbb\xbf%s\n", b"  %s \t\n\n"])
def test_what_editors_add_changes_no_secret(tmp_path: Path, form: bytes) -> None:
    """A line feed, nothing, a carriage return, a byte order mark, spaces."""
    assert proof_of(read_secret(written(tmp_path, form % SECRET.encode()), NAME)) == proof_of(SECRET)


BAD = {
    "nothing": b"",
    "the former form": b"0123456789abcdef" * 4 + b"\n",
    "words alone": b"correct horse battery staple\n",
    "a key that was cut": SECRET[:-20].encode(),
    "a key without its checksum": SECRET.partition("-")[0].encode(),
    "a key with a wrong digit": SECRET.replace(SECRET[20], "0" if SECRET[20] != "0" else "1").encode(),
    "two keys": f"{SECRET}\n{new_secret()}\n".encode(),
    "no text": b"\xff\xfe" * 20,
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_holds_no_secret_is_refused_by_name(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{NAME}=.*run\.secret"):
        read_secret(written(tmp_path, BAD[case]), NAME)


@pytest.mark.parametrize(
    "use", [lambda text: Admission("run", text), lambda text: place(0, 1, Address("127.0.0.1", 0), secret=text)]
)
def test_a_secret_in_a_program_has_the_same_forms(use: Callable[[object], object]) -> None:
    for text in ("", SECRET):
        use(text)
    with pytest.raises(ConfigurationError, match="does not begin with 'diloco-secret:'"):
        use("words that nobody else knows")
    for wrong in (SECRET.encode(), 1):
        with pytest.raises(ConfigurationError, match=r"it is an? (bytes|int) instead of a string"):
            use(wrong)


@pytest.mark.parametrize("reader", [lambda path: read_secret(path, NAME), load_identity])
def test_a_file_that_others_can_read_or_change_or_that_is_another_users_is_refused(
    tmp_path: Path, reader: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = written(tmp_path, f"{SECRET}\n".encode()), tmp_path / "link"
    link.symlink_to(path)
    for mode in (0o640, 0o604, 0o620, 0o602, 0o601, 0o610):
        path.chmod(mode)
        for each in (path, link):
            with pytest.raises(ConfigurationError, match=rf"by others \(mode {mode:o}\)\. Run chmod 600"):
                reader(each)
    path.chmod(0o600)
    owner = path.stat().st_uid or 12345
    if os.geteuid() == 0:
        os.chown(path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigurationError, match=f"belongs to another user .number {owner}"):
        reader(path)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (lambda path: os.mkfifo(path, 0o600), "not a regular file"),
    "a folder": (lambda path: path.mkdir(mode=0o700), "not a regular file"),
    "a link that leads nowhere": (lambda path: path.symlink_to("nowhere"), "can't be read"),
    "nothing": (lambda path: None, "can't be read"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, case: str) -> None:
    make, words = ODD[case]
    make(path := tmp_path / "run.secret")
    with pytest.raises(ConfigurationError, match=words):
        read_secret(path, NAME)


def test_a_key_is_made_once_only_its_owner_can_read_it_and_what_is_none_is_named(tmp_path: Path) -> None:
    made = load_identity(tmp_path / "deep" / "identity.key")
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert load_identity(made.path).peer_id == made.peer_id
    assert [each.name for each in made.path.parent.iterdir()] == ["identity.key"]
    with pytest.raises(ConfigurationError, match="holds no usable private key"):
        load_identity(written(tmp_path, b"no key"))


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_the_command_writes_a_secret_that_only_its_owner_can_read(
    tmp_path: Path, umask: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.secret"
    before = os.umask(umask)
    try:
        assert main(["secret", str(path)]) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    secret = read_secret(path, NAME)
    assert path.read_text("ascii") == f"{secret}\n"
    told = capsys.readouterr()
    assert str(path) in told.out
    assert secret not in told.out + told.err


@pytest.mark.parametrize("there", ["a file", "a folder", "a link", "no folder"])
def test_the_command_overwrites_nothing(tmp_path: Path, there: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.secret"
    if there == "a file":
        path.write_text("mine")
    elif there == "a folder":
        path.mkdir()
    elif there == "a link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path = tmp_path / "missing" / "run.secret"
    assert main(["secret", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
    assert there != "a file" or path.read_text() == "mine"


def test_a_file_that_can_not_be_written_whole_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["secret", str(tmp_path / "run.secret")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_each_purpose_has_its_own_key() -> None:
    admission, subkey = Admission("run", SECRET), b"subkey"
    keys = {derive_key(purpose, secret) for purpose in ("tls tcp", "tls swarm run") for secret in (SECRET, "")}
    proofs = {each.sign(subkey, b"content") for each in (admission, Admission("other", SECRET), Admission("run"))}
    places = {each.dht_key for each in (admission, Admission("other", SECRET), Admission("run"))}
    assert [len(each) for each in (keys, proofs, places)] == [4, 3, 3]
    assert admission.sign(b"a", b"bc") != admission.sign(b"ab", b"c")
    assert not [each for each in places if "run" in each]
