"""Damaged, truncated and forged checkpoints and other paths are refused, with their name and what would work."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from diloco.checkpoint import list_checkpoints, open_checkpoint, open_sound
from diloco.errors import CheckpointError
from tests.checkpoint.marked_checkpoints import mark_of, resealed, save


def load_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for part in checkpoint.parts:
        checkpoint.load(part)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    save(tmp_path / "saved", 1, 1.0)
    return save(tmp_path / "saved", 2, 2.0).parent


FILES = ["manifest.json", "replica-0.json", "replica-1.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_found_and_named(name: str, damaged: Path) -> None:
    path = damaged / "step-00000002" / name
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 30)):
        for bit in (0x01, 0x20, 0x80):
            path.write_bytes(content[:position] + bytes([content[position] ^ bit]) + content[position + 1 :])
            with pytest.raises(CheckpointError) as caught:
                load_all(damaged)
            assert str(path) in str(caught.value)
            assert "step-00000001 in the same folder is complete. Nothing was loaded." in str(caught.value)
    path.write_bytes(content)
    load_all(damaged)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["cut", "longer", "empty", "missing", "folder", "link", "FIFO"])
def test_cut_missing_and_linked_files_are_named(name: str, change: str, damaged: Path) -> None:
    path = damaged / "step-00000002" / name
    content = path.read_bytes()
    path.unlink()
    if change in ("cut", "longer", "empty"):
        path.write_bytes({"cut": content[:-1], "longer": content + b" ", "empty": b""}[change])
    elif change == "folder":
        path.mkdir()
    elif change == "FIFO":
        os.mkfifo(path)
    elif change == "link":
        outside = damaged / "outside"
        outside.write_bytes(content)
        path.symlink_to(outside)
        if name == "manifest.json":  # it names no path, and its digest protects its content
            load_all(damaged)
            return
    where = str(damaged / "step-00000002")
    with pytest.raises(CheckpointError, match=f"{where}.*{name.split('.')[0]}.*Nothing was loaded") as caught:
        open_checkpoint(damaged)
    assert name in str(caught.value)
    if change in ("folder", "link", "FIFO") and name != "manifest.json":
        assert "may point outside the checkpoint's folder" in str(caught.value)
    assert [checkpoint.path.name for checkpoint in list_checkpoints(damaged)] == ["step-00000001"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_older_checkpoint_stops_no_run(name: str, damaged: Path) -> None:
    """Only the one that is read must be whole; one that may have been saved after it is not passed over."""
    (damaged / "step-00000001" / name).write_bytes(b"")
    assert mark_of(damaged) == 2.0
    (damaged / "step-00000001").rename(damaged / "step-00000003")
    if name == "manifest.json":
        with pytest.raises(CheckpointError, match=r"step-00000003.* is damaged.* step-00000002 .* is complete"):
            open_checkpoint(damaged)
    else:  # the manifest says that it was saved first
        assert mark_of(damaged) == 2.0


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [bytes.swapcase, lambda content: content[:-1]])
def test_a_run_goes_on_from_the_one_before_a_damaged_checkpoint_and_says_what_that_costs(
    change: Callable[[bytes], bytes], name: str, damaged: Path
) -> None:
    path = damaged / "step-00000002" / name
    path.write_bytes(change(path.read_bytes()))
    checkpoint, sentences = open_sound(damaged)
    assert checkpoint.path.name == "step-00000001"
    assert name in sentences[0]
    assert "goes on from" in sentences[1]
    assert "; 1 steps are trained again" in sentences[1]
    with pytest.raises(CheckpointError, match="step-00000001 in the same folder is complete"):
        open_sound(damaged / "step-00000002")
    (damaged / "step-00000001" / name).unlink()
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        open_sound(damaged)


def test_a_sound_checkpoint_is_used_without_a_word(damaged: Path) -> None:
    checkpoint, sentences = open_sound(damaged)
    assert (checkpoint.path.name, sentences) == ("step-00000002", ())


def forge(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = place / "manifest.json"
    path.write_bytes(resealed(path.read_bytes(), change))


def naming(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda members: members["parts"]["run"].update({name: members["parts"]["run"].pop("run.json")})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda members: members.update(format_version=2), "format version 2, but .* that saved it can resume"),
        (naming("../step-00000001/run.json"), "outside the checkpoint's folder"),
        (naming("/etc/passwd"), "outside the checkpoint's folder"),
        (lambda members: members.pop("step"), r"manifest\.json is malformed"),
        (lambda members: members.update(step=True), r"manifest\.json is malformed"),
        (lambda members: members["parts"]["run"].update({"run.json": 3}), r"manifest\.json is malformed"),
        (lambda members: members.update(about=None), r"manifest\.json is malformed"),
    ],
)
def test_a_forged_manifest_is_refused(change: Callable[[dict[str, Any]], object], words: str, damaged: Path) -> None:
    """It can't point elsewhere, and those of other versions lack something."""
    forge(damaged / "step-00000002", change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(damaged)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("replica-0.safetensors", b"\x80\x04K\x01."),
        ("replica-0.safetensors", (2**60).to_bytes(8, "little")),
        ("replica-0.json", b"[" * 100_000 + b"]" * 100_000),
    ],
)
def test_forged_files_are_refused_by_part(name: str, content: bytes, damaged: Path) -> None:
    place = damaged / "step-00000002"
    (place / name).write_bytes(content)
    facts = {"size_bytes": len(content), "digest": xxhash.xxh3_128_hexdigest(content)}
    forge(place, lambda members: members["parts"]["replica-0"].update({name: facts}))
    with pytest.raises(CheckpointError, match=r"Part 'replica-0' of .* Nothing was loaded\."):
        open_checkpoint(damaged).load("replica-0")


def test_paths_without_a_checkpoint_are_answered_with_what_would_work(tmp_path: Path, damaged: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (damaged / "step-00000002" / "manifest.json").unlink()
    for path, what in (
        (tmp_path / "absent", "does not exist. Use a run folder, its checkpoints folder or a step-XXXXXXXX folder"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "step-00000001", r"has no manifest\.json, so it is not a complete checkpoint"),
        (tmp_path / "folder", "holds no complete checkpoint"),
        (damaged, r"step-00000002 has no manifest.* step-00000001 in the same folder is complete"),  # none silently
    ):
        with pytest.raises(CheckpointError, match=f"{what}.* Nothing was loaded"):
            open_checkpoint(path)
