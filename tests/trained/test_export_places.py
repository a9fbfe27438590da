"""The target of an export: existing files are kept unless they are an export, and no partial export remains."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.data import ByteTokenizer
from diloco.errors import CheckpointError, ConfigurationError
from diloco.model import DecoderSettings, build_model
from diloco.trained import Trained, export_huggingface, export_safetensors, load_trained


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    settings = DecoderSettings(layers=1, width=8, heads=2, ffn_width=16, vocab_size=257, max_sequence_length=16)
    model = build_model(settings, seed=0).eval()
    return Trained(model, ByteTokenizer(), 1, 16, tmp_path / "run" / "checkpoints" / "step-00000001")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_of_others_is_not_replaced(trained: Trained, tmp_path: Path) -> None:
    """Many programs write a config.json."""
    place = tmp_path / "project"
    place.mkdir()
    for name in ("config.json", "thesis.tex"):
        (place / name).write_text("{}")
    with pytest.raises(ConfigurationError, match="is not an exported model"):
        export_huggingface(trained, place, overwrite=True)
    assert names(place) == ["config.json", "thesis.tex"]


@pytest.mark.parametrize("filled", [False, True])
def test_a_link_stays_a_link(trained: Trained, tmp_path: Path, filled: bool) -> None:
    disk, link = tmp_path / "disk" / "model", tmp_path / "link"
    disk.mkdir(parents=True)
    link.symlink_to(disk)
    if filled:
        export_huggingface(trained, link)
    export_huggingface(trained, link, overwrite=True)
    assert link.is_symlink()
    assert names(tmp_path) == ["disk", "link"]
    assert names(tmp_path / "disk") == ["model"]
    assert load_trained(disk).sequence_length == 16
    (tmp_path / "weights.safetensors").symlink_to(tmp_path / "disk" / "weights.safetensors")
    export_safetensors(trained, tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").is_symlink()
    assert names(tmp_path / "disk") == ["model", "weights.safetensors"]


@pytest.mark.parametrize(("write", "name"), [(export_huggingface, "model"), (export_safetensors, "model.safetensors")])
def test_what_cannot_be_written_is_told_and_nothing_is_left(
    trained: Trained, tmp_path: Path, write: Callable[[Trained, Path], object], name: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"can't be written: .*What was there before is unchanged"):
        write(trained, tmp_path / "file" / name)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"can't be written: .*File too large"):
            write(trained, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["file"]
