"""`diloco export --push` against a stub of the hub's HTTP interface, since no hub can be reached in a test."""

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from diloco.cli import main
from tests.cli.runs import read_json, refused


class Hub(ThreadingHTTPServer):
    """The part of the hub that a push uses: creating a repository, asking for a file, and one commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.public = False  # whether it was there as a public one
        self.refuses: tuple[str, int] = ("", 0)  # a part of a path, and the code of the answer


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, code: int, value: object = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        assert self.path == "/api/models/me/model"
        files = [{"rfilename": name} for name in self.server.files]
        self.answer(200, {"id": "me/model", "private": not self.server.public, "tags": [], "siblings": files})

    def do_POST(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append(path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Authorization"] == "Bearer hf_stub"
        if hub.refuses[0] and hub.refuses[0] in path:
            self.answer(hub.refuses[1], {"error": "no"})
        elif path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer(200, {"url": f"http://127.0.0.1:{hub.server_port}/me/model"})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif path == "/api/models/me/model/preupload/main":
            files = [each["path"] for each in json.loads(body)["files"]]
            self.answer(200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})
        elif path == "/api/models/me/model/commit/main":
            lines = [json.loads(line)["value"] for line in body.splitlines()]
            hub.files |= {each["path"]: base64.b64decode(each["content"]) for each in lines if "path" in each}
            url = f"http://127.0.0.1:{hub.server_port}/me/model/commit/{'0' * 40}"
            self.answer(200, {"success": True, "commitUrl": url, "commitOid": "0" * 40})
        else:
            self.answer(500, {"error": f"the stub does not know {path}"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_stub")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_push_has_all_files_and_a_card_that_says_how_the_model_was_trained(
    files: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    out, summary = tmp_path / "out", read_json(files / "run" / "summary.json")
    assert main(["export", str(files / "run"), "--out", str(out), "--push", "me/model", "--private"]) == 0
    assert "to a private me/model: http://127.0.0.1" in capsys.readouterr().out
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("model", "me")
    assert created.get("visibility") == "private" or created["private"] is True
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


def test_a_card_that_is_there_stays(files: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files["README.md"] = b"by hand"
    assert main(["export", str(files / "run"), "--out", str(tmp_path / "out"), "--push", "me/model"]) == 0
    assert "the card that was there stays" in capsys.readouterr().out
    assert hub.files["README.md"] == b"by hand"
    assert "model.safetensors" in hub.files
    assert hub.created[0].get("visibility") != "private"


def test_a_line_of_the_card_is_one_line_whatever_a_log_from_elsewhere_says(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(files / "run", run := tmp_path / "run")
    text = (run / "metrics.jsonl").read_text().replace('"data": "', '"data": "a\\n\\n# Another\\u001b[2J')
    (run / "metrics.jsonl").write_text(text)
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--push", "me/model", "--dry-run"]) == 0
    assert r"| data | a\n\n# Another\x1b[2J" in capsys.readouterr().out
    step = {"schema": 1, "event": "StepFinished", "step": 1, "loss": "NaN", "tokens": 8, "sent_bytes": 0}
    for number, (change, code, words) in enumerate(
        [({}, 0, "nan nats per token"), ({"loss": "low"}, 1, "is not a log of this version: ValueError")]
    ):
        (run / "metrics.jsonl").write_text(json.dumps(step | change) + "\n")
        out = str(tmp_path / f"out {number}")
        assert main(["export", str(run), "--out", out, "--push", "me/model", "--dry-run"]) == code
        said = capsys.readouterr()
        assert words in said.out + said.err


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"public": True}, "it is public. Leave --private out"),
        # transformers loads an adapter that is in the repository of a whole model, and ignores the model
        ({"files": {"adapter_config.json": b"{}"}}, "its adapter_config.json would be loaded instead"),
        ({"refuses": ("create", 400)}, ""),
        ({"refuses": ("commit", 403)}, ""),
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


@pytest.mark.parametrize(
    ("words", "why"),
    [("--private", "need --push USER/NAME"), ("--push name", "--push name must be USER/NAME")],
)
def test_a_push_that_can_not_be_meant_is_refused(
    words: str, why: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(["export", str(files / "run"), *words.split(), "--out", "out"], capsys)
