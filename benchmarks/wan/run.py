"""One run: start a job's workers in their nodes, conduct them, and collect their measurements."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.wan.counters import busy_s, sessions_s
from benchmarks.wan.network import Network
from benchmarks.wan.plan import Job
from diloco.errors import TransportError


@dataclass(eq=False)
class Worker:
    """A worker process and its last report."""

    replica: int
    process: subprocess.Popen[bytes]
    result: Path
    log: Path
    buffered: bytes = b""
    reported: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    @property
    def _stdin(self) -> int:
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    def read(self) -> None:
        """Read the messages that have arrived.

        Raises:
            TransportError: if the worker has ended; with the last line of its log.
        """
        assert self.process.stdout is not None
        chunk = os.read(self.process.stdout.fileno(), 65536)
        if not chunk:
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise TransportError(f"replica {self.replica} ended early: {' '.join(last)}", replicas=[self.replica])
        *lines, self.buffered = (self.buffered + chunk).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if report["phase"] == "step":
                self.step = report["step"]
            else:
                self.reported = report

    def answer(self, value: Any) -> None:
        """Send the value that the worker waits for; `read` notices a worker that has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, json.dumps(value).encode() + b"\n")

    def end(self) -> None:
        """Kill the worker's session, which includes all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def run_job(network: Network, job: Job, python: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run ``job`` on a network that is up.

    Args:
        python: the interpreter of the workers.
        folder: the folder for their results and logs, which are overwritten.
        limit_s: the time from start to end after which a run is stopped and reported as unfinished.

    Returns:
        ``outcome`` ("finished", "unfinished" or "failed"). If finished: ``replicas`` (the measurements of each worker)
        and the shares of the cores' time, see `_conduct`. Otherwise: the reason, the steps done, the time elapsed
        and the bytes sent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job.to_record(), indent=1) + "\n", encoding="utf-8")
    started_s = time.monotonic()
    workers: list[Worker] = []
    try:
        for replica in range(job.num_replicas):
            workers.append(_start(network, replica, python, job_file, folder))
        return _conduct(workers, started_s + limit_s)
    except (TransportError, TimeoutError) as error:
        return {
            "outcome": "unfinished" if isinstance(error, TimeoutError) else "failed",
            "reason": str(error),
            "steps_done": min((worker.step for worker in workers), default=0),
            "elapsed_s": time.monotonic() - started_s,
            "wire_sent_bytes": [network.sent_bytes(worker.replica) for worker in workers],
        }
    finally:
        for worker in workers:
            worker.end()


def _start(network: Network, replica: int, python: Path, job_file: Path, folder: Path) -> Worker:
    result, log = folder / f"{replica}.json", folder / f"{replica}.log"
    result.unlink(missing_ok=True)
    arguments = [str(python), "-m", "benchmarks.wan.worker", str(job_file), str(replica), str(result)]
    environment = network.environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": network.device}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            network.command(replica, arguments),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    return Worker(replica, process, result, log)


def _conduct(workers: Sequence[Worker], deadline_s: float) -> dict[str, Any]:
    """Lead the workers through their phases, and return their measurements and the use of the CPU.

    ``cpu_busy`` and ``cpu_workers`` are the shares of all cores' time in the measured part that everything and the
    workers used.
    """
    _await(workers, "prepared", deadline_s)
    _answer(workers, [worker.reported["info"] for worker in workers])
    _await(workers, "warm", deadline_s)
    _answer(workers, time.monotonic() + 0.5)
    sessions = [worker.process.pid for worker in workers]
    began_s, all_before_s, ours_before_s = time.monotonic(), busy_s(), sessions_s(sessions)
    _await(workers, "measured", deadline_s)
    cores_s = (time.monotonic() - began_s) * (os.cpu_count() or 1)
    shares = {
        "cpu_busy": (busy_s() - all_before_s) / cores_s,
        "cpu_workers": (sessions_s(sessions) - ours_before_s) / cores_s,
    }
    _answer(workers, None)
    _await(workers, "counted", deadline_s)
    replicas = [json.loads(worker.result.read_text(encoding="utf-8")) for worker in workers]
    _answer(workers, None)
    return {"outcome": "finished", "replicas": replicas, **shares}


def _answer(workers: Sequence[Worker], value: Any) -> None:
    """Send all workers the value that they wait for."""
    for worker in workers:
        worker.answer(value)


def _await(workers: Sequence[Worker], phase: str, deadline_s: float) -> None:
    """Wait until all workers have reported ``phase``.

    Raises:
        TimeoutError: at ``deadline_s``.
        TransportError: if a worker ends earlier; with the last line of its log.
    """
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.process.stdout is not None
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while any(worker.reported.get("phase") != phase for worker in workers):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"the time allowed ended before every replica was {phase}")
            for key, _ in selector.select(remaining_s):
                key.data.read()
