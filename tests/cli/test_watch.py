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
        ("absent", "absent does not exist"),
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
        page = command.until(lambda: re.search(r"(http://127\.0\.0\.1:\d+/)\?token=\S+", command.output), "an address")
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with visitor.open(page[0]) as answer:
            assert b"<html" in answer.read()
        with visitor.open(page[1] + "events") as events:
            while not (told := json.loads(events.readline().partition(b"data: ")[2] or b"{}")).get("runs"):
                pass
            assert told["runs"]["0"]["header"]["step"] == 2
            with (run_folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(to_record(step(3))) + "\n")
            while b'"step": 3' not in events.readline():
                pass
            os.kill(command.pid, signal.SIGINT)
            command.end(0, limit_s=30)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_each_printed_address_opens_the_page_in_one_browser(host: str, run_folder: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        command = Command(processes, ["watch", run_folder, "--host", host, "--port", "0"], tmp_path / "said.txt")

        def told() -> list[re.Match[str]]:
            return [*re.finditer(r"http://\S+:(\d+)/\?token=(\S+)", command.output)]

        for number in range(2):
            command.until(lambda: len(told()) > number, "an address")  # noqa: B023
            found = told()[number]
            base = f"http://127.0.0.1:{found[1]}"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{base}/data.json")
            visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            visitor.open(f"{base}/?token={found[2]}").close()
            with visitor.open(f"{base}/data.json") as answer:
                assert json.load(answer) is not None
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{base}/?token={found[2]}")
        assert ("can change nothing" in command.output) == (host == "0.0.0.0")
        os.kill(command.pid, signal.SIGINT)
        command.end(0, limit_s=30)
