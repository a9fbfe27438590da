"""A Slurm job without Slurm: emulated `srun` and `scontrol` for a batch script, with tasks as local processes.

`srun` runs its command once for each task and forwards SIGTERM. When a task calls `python`, it passes its arguments to
the test, which runs them in a process that has already imported torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from diloco.cli import main
from tests.processes import Processes

SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$JOB/srun"
while [[ $1 == --* ]]; do shift; done
tasks=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
highest=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; done
    code=0
    wait "$task" || code=$?
    if ((code > highest)); then highest=$code; fi
done
exit $highest
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
show) for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do echo 127.0.0.1; done ;;
*) printf '%s\\n' "$*" >>"$JOB/scontrol" ;;
esac
"""
PYTHON = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
test = socket.socket(socket.AF_UNIX)
test.connect(os.path.join(os.environ["JOB"], "tasks"))
signal.signal(signal.SIGTERM, lambda *_: test.sendall(b"TERM\\n"))
test.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
sys.exit(int(test.recv(9)))
"""
LIMIT_S = 120


def run_command(rank: int, arguments: list[str], folder: Path) -> int:
    """Run `python -m diloco ...` in ``folder`` and return the exit code. This function is called in a new process."""
    assert arguments[:2] == ["-m", "diloco"]
    os.chdir(folder)
    with (
        (folder / f"task-{rank}.log").open("w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        return main(arguments[2:])


@dataclass
class Task:
    """A task of the job."""

    rank: int  # its process in `Processes`
    link: socket.socket  # connection to the emulated `python`, which waits for the exit code
    arguments: list[str]


@dataclass
class Slurm:
    """An emulation of Slurm for a batch script.

    Args:
        folder: the directory of submission.
        processes: the processes in which tasks run.
        nodes: the number of nodes of the job, with one task on each.
    """

    folder: Path
    processes: Processes
    nodes: int = 2
    job: int = 4711
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tools = self.folder / "tools"
        tools.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "JOB": str(self.folder),
            "SLURM_JOB_ID": str(self.job),
            "SLURM_JOB_NAME": "diloco",
            "SLURM_JOB_NODELIST": f"node[0-{self.nodes - 1}]",
            "SLURM_JOB_NUM_NODES": str(self.nodes),
            "SLURM_NTASKS": str(self.nodes),
            **self.environment,
        }
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "tasks"))
        self._listener.listen()
        self._listener.settimeout(LIMIT_S)

    def close(self) -> None:
        self._listener.close()

    def submit(self, script: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the batch script, as Slurm does on the first node."""
        return subprocess.Popen(
            ["bash", str(script), *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def tasks(self) -> list[Task]:
        """Start and return the tasks of the step that the script has submitted."""
        tasks = []
        for _ in range(self.nodes):
            link, _ = self._listener.accept()
            link.settimeout(LIMIT_S)
            arguments = json.loads(link.makefile().readline())
            (rank,) = self.processes.start(1, run_command, arguments, self.folder)
            tasks.append(Task(rank, link, arguments))
        return tasks

    def wait_for(self, path: Path, word: str, tasks: list[Task]) -> None:
        """Wait until the file at ``path``, which the tasks write, contains ``word``."""
        deadline_s = time.monotonic() + LIMIT_S
        while not (path.exists() and word in path.read_text()):
            assert time.monotonic() < deadline_s, f"no {word} in {path}"
            for task in tasks:
                assert self.processes.is_running(task.rank), (self.folder / f"task-{task.rank}.log").read_text()
            os.sched_yield()

    def forward_sigterm(self, tasks: list[Task]) -> None:
        """Wait until `srun` has signalled every task, and signal the process of each."""
        for task in tasks:
            assert task.link.recv(9) == b"TERM\n"
            os.kill(self.processes.pid(task.rank), signal.SIGTERM)

    def end(self, tasks: list[Task]) -> list[int]:
        """Wait for the processes, end each task with the exit code of its process, and return the exit codes."""
        codes = self.processes.results(LIMIT_S, [task.rank for task in tasks])
        for task in tasks:
            task.link.sendall(str(codes[task.rank]).encode())
            task.link.close()
        return list(codes.values())
