"""`diloco export --push` against a stub of the hub."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from huggingface_hub import HfApi

from diloco.cli import main
from tests.cli.runs import read_json


class Hub:
    """What a push asks of the hub, with the arguments that the library takes."""

    def __init__(self) -> None:
        self.created: list[tuple[str, bool]] = []  # the name of a repository, and whether it is to be private
        self.files: dict[str, bytes] = {}
        self.public = False  # whether it was there as a public one
        self.refuses = False

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        self.created.append((repo, private))
        return f"https://hub/{repo}"

    def model_info(self, repo: str) -> SimpleNamespace:
        siblings = [SimpleNamespace(rfilename=name) for name in self.files]
        return SimpleNamespace(private=not self.public, siblings=siblings)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str], commit_message: str
    ) -> None:
        if self.refuses:
            raise PermissionError("403")
        paths = [path for path in folder_path.iterdir() if path.name not in ignore_patterns]
        self.files |= {path.name: path.read_bytes() for path in paths}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A stub, since no hub can be reached in a test."""
    stub = Hub()

    def ask(name: str, api: HfApi, *given: Any, **named: Any) -> Any:
        return getattr(stub, name)(*given, **named)

    for name in ("create_repo", "model_info", "upload_folder"):
        method = mock.create_autospec(getattr(HfApi, name), side_effect=partial(ask, name))
        monkeypatch.setattr(HfApi, name, method)
    return stub


def test_a_push_has_all_files_and_a_card_that_says_how_the_model_was_trained(
    files: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    out, summary = tmp_path / "out", read_json(files / "run" / "summary.json")
    assert main(["export", str(files / "run"), "--out", str(out), "--push", "me/model", "--private"]) == 0
    assert "to a private me/model: https://hub/me/model" in capsys.readouterr().out
    assert hub.created == [("me/model", True)]
    assert hub.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= hub.files.keys()
    card = hub.files["README.md"].decode()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    for words in (
        *("| algorithm | streaming |", "| replicas (M) | 2 |", "| inner steps (H) | 3 |", "| codec | fp4 |"),
        f"| digest | {summary['global_params_digest']} |",
        f"| held-out loss | {summary['heldout_loss']:.4f} nats per token at step 6 |",
        *("after step 6 of 8", "| tokens | 192 |", "| versions | diloco ", "documents"),
    ):
        assert words in text, words
    assert str(files) not in card, "a card names no path of this machine"
    hub.files["README.md"] = b"by hand"
    again = ["export", str(files / "run"), "--out", str(out), "--overwrite", "--push", "me/model"]
    assert main(again) == 0
    assert "the card that was there stays" in capsys.readouterr().out
    assert hub.files["README.md"] == b"by hand"
    assert hub.created[1] == ("me/model", False)


def test_a_line_of_the_card_is_one_line_whatever_a_log_from_elsewhere_says(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(files / "run", run := tmp_path / "run")
    text = (run / "metrics.jsonl").read_text().replace('"data": "', '"data": "a\\n\\n# Another\\u001b[2J')
    (run / "metrics.jsonl").write_text(text)
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--push", "me/model", "--dry-run"]) == 0
    assert r"| data | a\n\n# Another\x1b[2J" in capsys.readouterr().out
    step = {"schema": 1, "event": "StepFinished", "step": 1, "tokens": 8, "sent_bytes": 0}
    for loss, code, words in (("NaN", 0, "nan nats per token"), ("low", 1, "is not a log of this version: ValueError")):
        (run / "metrics.jsonl").write_text(json.dumps(step | {"loss": loss}) + "\n")
        assert main(["export", str(run), "--out", str(tmp_path / loss), "--push", "me/model", "--dry-run"]) == code
        said = capsys.readouterr()
        assert words in said.out + said.err


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"public": True}, "it is public. Leave --private out"),
        # transformers loads an adapter that is in the repository of a whole model, and ignores the model
        ({"files": {"adapter_config.json": b"{}"}}, "its adapter_config.json would be loaded instead"),
        ({"refuses": True}, "PermissionError: 403"),
    ],
    ids=str,
)
def test_what_can_not_be_pushed_is_said_and_the_export_stays(
    state: dict[str, Any], words: str, files: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    vars(hub).update(state)
    before, out = dict(hub.files), tmp_path / "out"
    assert main(["export", str(files / "run"), "--out", str(out), "--push", "me/model", "--private"]) == 1
    said = capsys.readouterr().err
    assert f"{out} is complete, but can't be pushed to me/model: " in said
    assert words in said
    assert hub.files == before
    assert (out / "model.safetensors").exists()
