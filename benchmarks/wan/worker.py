"""``python -m benchmarks.wan.worker JOB.json REPLICA RESULT.json``: one replica, started inside a node of the network.

Worker and parent exchange JSON lines on standard input and output, so that only the method under test uses the network.
The worker reports prepared, warm, measured and counted, and waits for an answer to each; the answer to prepared is the
information about all replicas, that to warm is the time to start.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.wan.counters import interface_bytes
from benchmarks.wan.methods.base import Program
from benchmarks.wan.plan import Job


class Parent:
    """The connection to the parent. Whatever libraries print to standard output goes to standard error instead."""

    def __init__(self) -> None:
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def report(self, phase: str, **facts: Any) -> None:
        """Send one line at once."""
        self._out.write(json.dumps({"phase": phase, **facts}) + "\n")
        self._out.flush()

    def ask(self, phase: str, **facts: Any) -> Any:
        """Report a phase, and return the answer, which arrives when all replicas have reported the same phase."""
        self.report(phase, **facts)
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(f"The parent process ended in phase {phase!r}. This replica stops.")
        return json.loads(line)


def main(arguments: Sequence[str]) -> None:
    job = Job.from_record(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    replica, out = int(arguments[1]), Path(arguments[2])
    torch.set_num_threads(1)
    parent = Parent()
    program: Program = importlib.import_module(f"benchmarks.wan.methods.{job.method.program}").Program(job, replica)
    program.connect(parent.ask("prepared", info=dict(program.prepare())))
    for step in range(1, program.warmup_steps + 1):
        program.step(step)
        parent.report("step", step=step)
    start_at_s = parent.ask("warm")
    time.sleep(max(0.0, start_at_s - time.monotonic()))  # all nodes are on one machine and share this clock
    result = measure(program, parent)
    out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    parent.ask("counted")
    program.close()


def measure(program: Program, parent: Parent) -> dict[str, Any]:
    """Run the measured part. Bytes are counted when every replica has finished, so that late replies are included."""
    received_before, sent_before = interface_bytes(device=program.job.device)
    payload_before, syncs_before = program.payload_bytes, len(program.waits_s)
    transfers_before = len(program.transfers_s)
    started_s = time.perf_counter()
    for step in range(program.warmup_steps + 1, program.warmup_steps + program.measured_steps + 1):
        program.step(step)
        parent.report("step", step=step)
    wall_s = time.perf_counter() - started_s
    parent.ask("measured")
    received, sent = interface_bytes(device=program.job.device)
    waits_s = program.waits_s[syncs_before:]
    transfers_s = program.transfers_s[transfers_before:]
    return {
        "steps": program.measured_steps,
        "wall_s": wall_s,
        "wire_sent_bytes": sent - sent_before,
        "wire_received_bytes": received - received_before,
        "payload_sent_bytes": program.payload_bytes - payload_before,
        "syncs": len(waits_s),
        "failures": program.failures,
        "waits_s": [round(value, 4) for value in waits_s],
        "transfers_s": [round(value, 4) for value in transfers_s],
        "digest": program.digest(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
