"""Saved state is loaded unchanged by every name of a checkpoint; which checkpoints are kept; when each is on disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from diloco.checkpoint import SavedValues, list_checkpoints, load_own, open_checkpoint
from tests.checkpoint.marked_checkpoints import mark_of, names, save
from tests.same import same


def test_what_is_saved_is_what_is_loaded_and_it_says_what_it_holds(tmp_path: Path) -> None:
    place = save(tmp_path / "checkpoints", 1000, 7.0)
    assert place == tmp_path / "checkpoints" / "step-00001000"
    files = {"replica-0.json", "replica-0.safetensors", "replica-1.json", "replica-1.safetensors"}
    assert names(place) == files | {"run.json", "run.safetensors", "manifest.json"}
    checkpoint = open_checkpoint(place)
    assert (checkpoint.step, [*checkpoint.parts]) == (1000, ["replica-0", "replica-1", "run"])
    assert checkpoint.about == {"algorithm": "streaming", "mark": 7.0}
    assert checkpoint.versions["torch"] == torch.__version__
    on_disk = sum(entry.stat().st_size for entry in place.iterdir() if entry.name != "manifest.json")
    assert checkpoint.size_bytes == on_disk
    assert mark_of(place) == 7.0
    assert checkpoint.load("replica-0", device="meta")["weight"].device.type == "meta"


def test_every_way_to_name_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, 1.0)
    save(folder, 2, 2.0)
    for path in (tmp_path, folder, folder / "latest", folder / "step-00000002"):
        assert mark_of(path) == 2.0
    assert mark_of(folder / "step-00000001") == 1.0
    (folder / "step-00000001").rename(tmp_path / "best")
    assert mark_of(tmp_path / "best") == 1.0


def test_only_the_last_ones_stay_in_the_order_of_saving(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, float(step), keep=2)
    assert names(tmp_path) == {"latest", "step-00000020", "step-00000030"}
    # a run that resumes from step 20 again: step 30 belongs to the abandoned run and is the oldest
    save(tmp_path, 20, 20.5, keep=2)
    save(tmp_path, 25, 25.0, keep=2)
    assert [checkpoint.path.name for checkpoint in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000025"]
    assert [mark_of(checkpoint.path) for checkpoint in list_checkpoints(tmp_path)] == [20.5, 25.0]
    assert mark_of(tmp_path) == 25.0
    save(tmp_path, 5, 5.0, keep=1)
    assert names(tmp_path) == {"latest", "step-00000005"}


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order: the files, the manifest, their folder, the rename, the parent folder; ``latest`` in the same way."""
    events: list[str] = []
    place, replace = tmp_path / "step-00000003", os.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {os.fstat(descriptor).st_ino}")

    def replaced(source: Path, target: Path) -> None:
        events.append(f"name {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save(tmp_path, 3, 3.0)

    def sync(path: Path) -> str:
        return f"sync {path.stat().st_ino}"

    assert set(events[:6]) == {sync(entry) for entry in place.iterdir()} - {sync(place / "manifest.json")}
    assert events[6:] == [
        sync(place / "manifest.json"),
        sync(place),
        "name step-00000003",
        sync(tmp_path),
        sync(tmp_path / "latest"),
        "name latest",
        sync(tmp_path),
    ]


def test_the_layout_of_version_0_5_0_is_read(tmp_path: Path) -> None:
    """The checkpoint is written by hand here, so that a change of the writer can't change it too."""
    place = tmp_path / "checkpoints" / "step-00000007"
    place.mkdir(parents=True)
    rows = {
        f"values-shard-{s}": {
            "dict": {
                "weight": {
                    "dict": {
                        "whole": [4, 2],
                        "offsets": [2 * s, 0],
                        "sizes": [2, 2],
                        "dtype": "float32",
                        "values": {"tensor": "weight.values"},
                    }
                }
            }
        }
        for s in (0, 1)
    }
    state = {"dict": {"moments": {"dict": [[0, {"tuple": [{"tensor": "moments.0.0"}, {"float": "inf"}]}]]}}}
    weight = torch.arange(8.0).view(4, 2)
    contents: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
        "run": (state, {"moments.0.0": torch.ones(3)}),
        **{part: (rows[part], {"weight.values": weight[2 * s : 2 * s + 2]}) for s, part in enumerate(rows)},
        "values-rank-0": ({"dict": {"in_flight": []}}, {}),
        "values-rank-1": ({"dict": {"in_flight": [1]}}, {}),
    }
    parts: dict[str, Any] = {}
    for part, (skeleton, tensors) in contents.items():
        (place / f"{part}.json").write_text(json.dumps(skeleton))
        save_file(tensors, place / f"{part}.safetensors")
        raw = {name: (place / name).read_bytes() for name in (f"{part}.json", f"{part}.safetensors")}
        facts = {n: {"size_bytes": len(data), "digest": xxhash.xxh3_128_hexdigest(data)} for n, data in raw.items()}
        parts[part] = facts
    versions = {"diloco": "0.5.0", "torch": "2.13.0", "python": "3.12.0"}
    members = {"format_version": 1, "step": 7, "serial": 0, "versions": versions, "about": {"seed": 3}, "parts": parts}
    body = json.dumps(members, indent=2).removesuffix("\n}").encode()
    digest = xxhash.xxh3_128_hexdigest(body)
    (place / "manifest.json").write_bytes(body + f',\n  "digest": "{digest}"\n}}\n'.encode())
    (tmp_path / "checkpoints" / "latest").write_text("step-00000007\n")

    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.about, checkpoint.versions) == (7, {"seed": 3}, versions)
    assert same(checkpoint.load("run"), {"moments": {0: (torch.ones(3), math.inf)}})
    room = {"weight": torch.zeros(4, 2)}
    SavedValues(checkpoint, "values").load_into(room)
    assert same(room["weight"], weight)
    assert load_own(checkpoint, "values", position=1, num_shards=2) == {"in_flight": [1]}
