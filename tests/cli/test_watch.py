"""The command `diloco watch`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from diloco.cli import main
from diloco.events import to_record
from tests.commands import Command
from tests.monitor.made_events import started, step
from tests.processes import Processes


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [json.dumps(to_record(event)) for event in (started(), step(1), step(2))]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "give the folder of a run"),
        ("--run mine", "--join, the address of a peer, is missing"),
        ("--join /ip4/127.0.0.1/tcp/1/p2p/Qm", "--run, the name of the run, is missing"),
        ("absent", "absent is not a folder"),
        ("{folder} --alert.silent-s 0", "alert.silent_s must be positive"),
        ("{folder} --every-s 0", "--every-s must be positive"),
        ("{folder} --host 203.0.113.7", "can't listen at 203.0.113.7"),
        ("{folder} --port {taken}", "Choose another --port"),
    ],
)
def test_what_can_not_work_is_refused(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = arguments.format(folder=run_folder, taken=taken.getsockname()[1])
        assert main(["watch", *given.split()]) == 2
    assert words in capsys.readouterr().err


def test_a_page_is_exported(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["watch", str(run_folder), "--export", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    (held,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    (run,) = json.loads(held)["runs"].values()
    assert (run["name"], run["header"]["step"]) == ("mine", 2)
    assert main(["watch", str(run_folder), "--export", str(tmp_path / "absent" / "page.html")]) == 2


def test_it_serves_until_ctrl_c_also_while_a_page_is_open(run_folder: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        command = Command(processes, ["watch", run_folder, "--every-s", "0.05"], tmp_path / "said.txt")
        address = command.until(lambda: re.search(r"http://127\.0\.0\.1:\d+/", command.words), "an address")[0]
        with urllib.request.urlopen(address + "events") as events:
            while not (told := json.loads(events.readline().partition(b"data: ")[2] or b"{}")).get("runs"):
                pass
            assert told["runs"]["0"]["header"]["step"] == 2
            with (run_folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(to_record(step(3))) + "\n")
            while b'"step": 3' not in events.readline():
                pass
            os.kill(command.pid, signal.SIGINT)
            command.end(0, limit_s=30)


def test_who_comes_from_elsewhere_needs_the_token_and_the_owner_is_told_what_is_shown(
    run_folder: Path, tmp_path: Path
) -> None:
    with Processes() as processes:
        command = Command(processes, ["watch", run_folder, "--host", "0.0.0.0", "--port", "0"], tmp_path / "said.txt")
        found = command.until(lambda: re.search(r"http://\S+:(\d+)/\?token=(\S+)", command.words), "an address")
        address = f"http://127.0.0.1:{found[1]}/data.json"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address)
        cookie = {"Cookie": f"diloco-watch={found[2]}"}
        with urllib.request.urlopen(urllib.request.Request(address, headers=cookie)) as answer:
            assert json.load(answer) is not None
        assert "can change nothing" in command.words
        assert "not encrypted" in command.words
        os.kill(command.pid, signal.SIGINT)
        command.end(0, limit_s=30)
