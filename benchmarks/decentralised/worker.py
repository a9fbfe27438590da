"""``python -m benchmarks.decentralised.worker JOB.json REPLICA RESULT.json``: one worker, inside a node of the network.

Worker and parent exchange JSON lines on standard input and output; see `conduct`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.decentralised.methods.base import Program
from benchmarks.decentralised.plan import Job
from benchmarks.wan.worker import Parent

__all__: list[str] = []


def main(arguments: Sequence[str]) -> None:
    job = Job.from_record(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    replica, out = int(arguments[1]), Path(arguments[2])
    torch.set_num_threads(1)
    parent = Parent()
    module = importlib.import_module(f"benchmarks.decentralised.methods.{job.method.program}")
    program: Program = module.Program(job, replica)
    program.connect(parent.ask("prepared", info=dict(program.prepare())))
    parent.ask("warm")
    turns = itertools.count(1)
    program.measure(lambda: float(parent.ask(f"ready-{next(turns)}")))
    parent.ask("measured")
    out.write_text(json.dumps(program.result()) + "\n", encoding="utf-8")
    parent.ask("counted")
    program.close()


if __name__ == "__main__":
    main(sys.argv[1:])
