"""Secrets and private keys: which files are accepted, and what is derived from them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from diloco.cli import main
from diloco.errors import ConfigurationError
from diloco.private_files import create_private
from diloco.transport import Address, Admission, derive_key, load_identity, load_key, new_secret, read_secret
from tests.transport.nowhere import place

SECRET = new_secret()
NAME = "network.secret_file"


def written(folder: Path, content: bytes) -> Path:
    path = folder / "run.secret"
    create_private(path, content)
    return path


@pytest.mark.parametrize("form", [b"%s\n", b"%s", b"%s\r\n", b"\xef\xbb\xbf%s\n", b"  %s \t\n\n"])
def test_what_editors_add_changes_no_secret(tmp_path: Path, form: bytes) -> None:
    """A line feed, nothing, a carriage return, a byte order mark, spaces."""
    assert read_secret(written(tmp_path, form % SECRET.encode()), NAME) == SECRET


@pytest.mark.parametrize(
    "content",
    ["", "0123456789abcdef" * 4, SECRET[:-20], SECRET.partition("-")[0], f"{SECRET}\n{new_secret()}\n", "\xff\xfe" * 20,
     SECRET.replace(SECRET[20], "0" if SECRET[20] != "0" else "1")],
    ids=["nothing", "another form", "cut", "no checksum", "two", "no text", "a wrong digit"],
)  # fmt: skip
def test_a_file_that_holds_no_secret_is_refused_by_name(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{NAME}=.*run\.secret"):
        read_secret(written(tmp_path, content.encode("latin-1")), NAME)


@pytest.mark.parametrize(
    "use", [lambda text: Admission("run", text), lambda text: place(0, 1, Address("127.0.0.1", 0), secret=text)]
)
def test_a_secret_in_a_program_has_the_same_forms(use: Callable[[object], Any]) -> None:
    for text in ("", SECRET, f"{SECRET}\n", f" {SECRET}\r\n"):  # as a file is read whole
        assert use(text).secret == text.strip()
    for wrong, words in (("words", "does not begin with 'diloco-secret:'"), (SECRET.encode(), "a bytes instead")):
        with pytest.raises(ConfigurationError, match=words):
            use(wrong)


@pytest.mark.parametrize("reader", [lambda path: read_secret(path, NAME), load_identity])
def test_a_file_that_others_can_read_or_change_or_that_is_another_users_is_refused(
    tmp_path: Path, reader: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = written(tmp_path, SECRET.encode()), tmp_path / "link"
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


@pytest.mark.parametrize("mode", [0o440, 0o640, 0o400, 0o444, 0o460, 0o450, 0o441])
def test_root_may_give_a_file_to_a_group_to_read_and_nothing_more(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes does: a secret in a pod with a user and a group belongs to root and that group."""
    path, status = written(tmp_path, SECRET.encode()), os.fstat

    def of_root(descriptor: int) -> os.stat_result:
        found = status(descriptor)
        return os.stat_result((stat.S_IFREG | mode, *found[1:4], 0, *found[5:]))

    monkeypatch.setattr(os, "fstat", of_root)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if mode & 0o037:
        with pytest.raises(ConfigurationError, match=rf"by others \(mode {mode:o}\)"):
            read_secret(path, NAME)
    else:
        assert read_secret(path, NAME) == SECRET


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "link").symlink_to("nowhere")
    for name, words in (("fifo", "not a regular file"), ("", "not a regular file"), ("link", "can't be read")):
        with pytest.raises(ConfigurationError, match=words):
            read_secret(tmp_path / name, NAME)


def test_a_key_is_made_once_only_its_owner_can_read_it_and_what_is_none_is_named(tmp_path: Path) -> None:
    made = load_identity(tmp_path / "deep" / "identity.key")
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert load_identity(made.path).peer_id == made.peer_id
    assert [each.name for each in made.path.parent.iterdir()] == ["identity.key"]
    peer_id = load_identity.__globals__["load_engine"]().PeerID.from_identity(made.path.read_bytes())
    assert str(peer_id) == made.peer_id, "libp2p reads it, too"


def in_file(key: Any, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    der = key.private_bytes(Encoding.DER, form, NoEncryption())
    return bytes((8, 0, 0x12, len(der) % 128 | 128, len(der) // 128)) + der


def test_a_file_that_is_no_key_of_a_run_is_refused_by_name(tmp_path: Path) -> None:
    """Damaged, or with a key that TLS, libp2p or both would not take: a process must not end in the middle of them."""
    whole = load_key(tmp_path / "identity.key")
    data = (tmp_path / "identity.key").read_bytes()
    assert data == in_file(whole, PrivateFormat.TraditionalOpenSSL)
    wrong = {
        "empty": b"", "cut": data[:-1], "longer": data + b"\0", "another size": data[:3] + b"\xff\x7f" + data[5:],
        "a bit": data[:600] + bytes([data[600] ^ 1]) + data[601:], "text": b"no key", "zeros": bytes(1200),
        "another form": in_file(whole), "elliptic": in_file(ec.generate_private_key(ec.SECP256R1())),
        "x25519": in_file(x25519.X25519PrivateKey.generate()),
        "short": in_file(rsa.generate_private_key(65537, 1024), PrivateFormat.TraditionalOpenSSL),
    }  # fmt: skip
    for name, content in wrong.items():
        path = tmp_path / name
        create_private(path, content)
        with pytest.raises(ConfigurationError, match=f"{path} holds no usable private key"):
            load_key(path)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_command_writes_a_secret_that_only_its_owner_can_read_and_overwrites_nothing(
    tmp_path: Path, umask: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.secret"
    before = os.umask(umask)
    try:
        assert main(["secret", str(path)]) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    secret, told = read_secret(path, NAME), capsys.readouterr()
    assert path.read_text("ascii") == f"{secret}\n"
    assert str(path) in told.out
    assert secret not in told.out + told.err
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for there in (path, tmp_path, tmp_path / "link", tmp_path / "missing" / "run.secret"):
        assert main(["secret", str(there)]) == 2
        assert str(there) in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "run.secret"]
    assert read_secret(path, NAME) == secret


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
