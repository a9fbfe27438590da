"""Replicas in processes of their own go on as more and as fewer, as they do in one process."""

from __future__ import annotations

import json
from pathlib import Path

from diloco.checkpoint.reading import list_checkpoints
from diloco.cli import main
from tests.data.streams import numbered
from tests.processes import Processes, free_port
from tests.runs import SMALL

STREAMING = "--data.streaming --data.streaming-block 3 --data.heldout-fraction 0.2 --data-parallel-steps 3"


def rank(replica: int, arguments: str, port: int) -> int:
    place = f"--transport torch --replica {replica} --rendezvous 127.0.0.1:{port}" if port else ""
    return main(["train", *arguments.split(), *place.split(), "--monitor.console", "quiet", "--train.threads", "1"])


def test_processes_go_on_as_more_and_as_fewer(tmp_path: Path) -> None:
    """Replica 2 is new and begins from replica 0's checkpoint; then it and replica 1 go, and others read the documents
    that they had begun: what each has read of a stream stands in its own checkpoint alone."""
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in numbered(120)))
    digests = []
    for name, in_processes in (("many", True), ("one", False)):
        out = tmp_path / name
        for replicas, stop in ((2, 5), (3, 9), (1, 12)):
            begin = f"{SMALL} {data} {STREAMING} --out {out}" if replicas == 2 else f"--resume {out}"
            arguments = f"{begin} --replicas {replicas} --stop-after {stop}"
            if in_processes:
                with Processes() as processes:
                    processes.start(replicas, rank, arguments, free_port())
                    assert set(processes.results(timeout_s=300).values()) == {0}
            else:
                assert rank(0, arguments, 0) == 0
        digests.append(json.loads((out / "summary.json").read_text())["global_params_digest"])
    assert digests[0] == digests[1]
    left = [list_checkpoints(tmp_path / "many" / f"replica-{m}" / "checkpoints")[-1].path.name for m in (1, 2)]
    assert left == ["step-00000009"] * 2
