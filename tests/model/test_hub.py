"""A model of a local Hugging Face hub that sends weights as slowly as a test needs."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from diloco.model import ModelSettings, build_language_model
from diloco.waiting import LOGGER
from tests.huggingface import config_of
from tests.lazy import Lazy

transformers = Lazy("transformers")

COMMIT = "c" * 40
CHUNK_BYTES = 10_000  # written to disk at a time


class Hub(ThreadingHTTPServer):
    """A hub with org/llama; it sends half of the weights after `told` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.told = threading.Event()


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        described = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
        answers = {
            "/api/models/org/llama/revision/main": json.dumps({"id": "org/llama", "sha": COMMIT}).encode(),
            f"/api/models/org/llama/tree/{COMMIT}": json.dumps(described).encode(),
            **{f"/org/llama/resolve/{COMMIT}/{name}": data for name, data in files.items()},
        }
        body = answers.get(path, b"")
        self.send_response(200 if body else 404)
        self.send_header("ETag", f'"{path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(body) // 2 if path.endswith("model.safetensors") else len(body)
        self.wfile.write(body[:half])
        assert half == len(body) or self.server.told.wait(60)
        self.wfile.write(body[half:])

    def log_message(self, format: str, *args: object) -> None:
        """A stream that discards its text."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    transformers.AutoModelForCausalLM.from_config(config_of("Llama")).save_pretrained(tmp_path / "given")
    with Hub(tmp_path / "given") as serving:
        address = f"http://127.0.0.1:{serving.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK_BYTES)
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.told.set()
        serving.shutdown()
        thread.join()


def test_who_waits_for_weights_is_told_how_much_has_come(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if (come := re.search(r"([\d.]+) kB received", lines[-1])) and float(come[1]) > CHUNK_BYTES / 1e3:
                hub.told.set()

    monkeypatch.setattr("diloco.waiting.FIRST_S", 0.01)
    monkeypatch.setattr(LOGGER, "handlers", [Heard()])
    model = build_language_model(ModelSettings(source="hf:org/llama"), seed=0)
    assert model.weights == "stored"
    assert hub.told.is_set()
    assert lines[-1].startswith(f"waiting for org/llama from http://127.0.0.1:{hub.server_port} (")
