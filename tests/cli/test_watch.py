"""The command `diloco watch`."""

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
        ("--join /ip4/127.0.0.1/tcp/1/p2p/Qm", "--run, the name of the run, is missing"),
        ("absent", "absent does not exist"),
        ("{folder}/..", "neither metrics.jsonl nor config.toml"),
        ("{folder} --host 203.0.113.7", "can't listen at 203.0.113.7"),
        ("{folder} --port {taken}", "Choose another --port"),
        ("{folder} --out {folder}/absent/page.html", "can't be written"),
    ],
)
def test_what_can_not_work_is_refused(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = arguments.format(folder=run_folder, taken=taken.getsockname()[1])
        assert main(["watch", *given.split()]) == 2
    assert words in capsys.readouterr().err


def test_page_is_written_to_a_file(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["watch", str(run_folder), "--out", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    (run,) = json.loads(data)["runs"]
    assert (run["name"], run["header"]["step"]) == ("mine", 2)


def test_page_is_served_live_until_ctrl_c(run_folder: Path, tmp_path: Path) -> None:
    with Processes() as processes:
        arguments = ["watch", run_folder, "--host", "0.0.0.0", "--port", "0", "--every", "50ms"]
        command = Command(processes, arguments, tmp_path / "said.txt")
        said = command.until(lambda: re.search(r"http://\S+:(\d+)/\?token=(\S+)", command.output), "an address")
        base, visitor = f"http://127.0.0.1:{said[1]}", urllib.request.build_opener(urllib.request.HTTPCookieProcessor())

        def step_of() -> int:
            with visitor.open(f"{base}/data.json") as answer:
                return int(json.loads(answer.read())["runs"][0]["header"]["step"])

        visitor.open(f"{base}/?token={said[2]}").close()
        assert step_of() == 2
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{base}/data.json")
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(to_record(step(3))) + "\n")
        command.until(lambda: step_of() == 3, "the new step")
        assert "can change nothing" in command.output
        os.kill(command.pid, signal.SIGINT)
        command.end(0, limit_s=30)
