"""``python -m benchmarks.same_bits --before CHECKOUT``: compare runs of the package in CHECKOUT and of this one.

``--transports`` compares runs of this one over all transports instead, by the digests of their global parameters.

Every run is a `diloco train` in a process whose ``PYTHONPATH`` is the ``src`` of one of the checkouts. The comparison
covers the digests of the final global parameters, the losses of all steps, and everything in `config.toml`,
`summary.json` and `metrics.jsonl` except times, paths and prose. Some runs are also stopped and resumed, by the version
that stopped them, and by this version from the checkpoint of CHECKOUT. They must end like the uninterrupted run.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.same_bits.cases import CASES, NORMED, OF_TRANSPORTS, TRANSPORTS, Case, write_text

HERE = Path(__file__).parents[2]
SERVER = """
import json, os, sys, traceback
replies = os.dup(1)
os.dup2(2, 1)
from diloco.cli import main
for line in sys.stdin:
    try:
        code = main(json.loads(line))
    except Exception:
        code = traceback.print_exc()
    os.write(replies, f"{code}\\n".encode())
"""
VARYING = {"time_s", "step_s", "wall_s", "tokens_per_s", "save_s", "model_flops_utilization", "size_bytes"} | {
    "free_bytes", "late_s", "path", "paths", "source", "out", "resumed_from", "facts", "details", "note", "reason"
}  # fmt: skip
FILES = ("config.toml", "summary.json", "metrics.jsonl")
WAITS = {"wait_s", "compute_utilization"}
"""Reproducible only with a virtual clock."""
LAST_ONE = {"heldout_loss", "perplexity", "bits_per_byte"}
"""Results of the final evaluation. The second peer of a swarm evaluates only if the first one left in time."""


class Version:
    """A checkout of the package and the folder of its runs. One process imports the package and makes many runs."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src"), "OMP_NUM_THREADS": "1"}
        self.log = (folder / "output.txt").open("a")
        self.server = self._python("-c", SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)

    def _python(self, *words: str, **pipes: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *words], env=self.environment, text=True, **pipes)

    def train(self, case: Case, text: Path, name: str, *more: str) -> Path:
        """Train in a new folder and return it. A swarm has a subfolder for each of its two peers."""
        folder = self.folder / case.folder / name
        if any(folder.rglob("summary.json")):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        settings = self.folder / case.folder / f"{name}.toml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(case.toml(), encoding="utf-8")
        arguments = ["train", str(settings), "--data", str(text), *more]
        if case.transport == "swarm":
            peers = [["--out", str(folder / out), "--replica", replica] for out, replica in (("a", "0"), ("b", "1"))]
            self._swarm([[*arguments, *peer] for peer in peers])
        else:
            self._run(case, [*arguments, "--out", str(folder)])
        return folder

    def resume(self, case: Case, folder: Path) -> None:
        """Resume the run in ``folder``."""
        own_code = ["--model", NORMED] if NORMED in case.settings.values() else []  # a folder does not choose the code
        self._run(case, ["train", "--resume", str(folder), *own_code])

    def _run(self, case: Case, arguments: Sequence[str]) -> None:
        """Run all replicas: in one torchrun, in one for each over TCP if they have several ranks, or by one command."""
        commands, ranks = [[*arguments]], case.replicas * case.replica_size
        if case.transport == "tcp" and case.replica_size > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                join, ranks = f"127.0.0.1:{free.getsockname()[1]}", case.replica_size
            commands = [[*arguments, "--replica", str(number), "--join", join] for number in range(case.replicas)]
        elif case.transport != "torch":
            self._serve(arguments)
            return
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "diloco"]
        started = [self._python(*torchrun, *words, stdout=self.log, stderr=self.log) for words in commands]
        if any([each.wait() for each in started]):
            raise self._failed(arguments)

    def _serve(self, arguments: Sequence[str]) -> None:
        assert self.server.stdin
        assert self.server.stdout
        print(json.dumps(arguments), file=self.server.stdin, flush=True)
        if self.server.stdout.readline().strip() != "0":
            raise self._failed(arguments)

    def _swarm(self, commands: Sequence[Sequence[str]]) -> None:
        """Run two peers; the second one joins at the address that the first one prints."""
        first = self._python("-m", "diloco", *commands[0], stderr=subprocess.PIPE)
        assert first.stderr
        lines = iter(first.stderr.readline, "")
        address = next((match[1] for line in lines if (match := re.search(r"--join (/ip4/127\S+)", line))), "")
        second = self._python("-m", "diloco", *commands[1], "--join", address, stderr=self.log)
        self.log.writelines(lines)
        if first.wait() or second.wait():
            raise self._failed(commands[0])

    def _failed(self, arguments: Sequence[str]) -> SystemError:
        return SystemError(f"`diloco {shlex.join(arguments)}` failed. The end of {self.log.name} shows the error.")

    def close(self) -> None:
        self.server.communicate()
        self.log.close()


def end(folder: Path) -> tuple[list[str], list[float]]:
    """Return the final digests of the processes of a run, and the losses of all their steps."""
    summaries = [json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))]
    metrics = (path.read_text().splitlines() for path in sorted(folder.rglob("metrics.jsonl")))
    events = (json.loads(line) for lines in metrics for line in lines)
    losses = [event["loss"] for event in events if event["event"] == "StepFinished"]
    return [summary["global_params_digest"] for summary in summaries], losses


def lasting(value: Any, without: set[str]) -> Any:
    """Return a record without the fields in ``without``."""
    if isinstance(value, Mapping):
        return {name: lasting(part, without) for name, part in value.items() if name not in without}
    return [lasting(part, without) for part in value] if isinstance(value, list) else value


def contents(case: Case, folder: Path) -> dict[str, list[Any]]:
    """Return what must be the same in two runs: for each file, its records."""
    found: dict[str, list[Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.name in FILES):
        text, second = path.read_text(), case.transport == "swarm" and path.parent.name == "b"
        without = VARYING | (set() if "emulate.step_time" in case.settings else WAITS) | (LAST_ONE if second else set())
        if path.name == "metrics.jsonl":
            unsure = {"Note"} | ({"Evaluated", "SampleGenerated"} if second else set())
            read = [each for line in text.splitlines() if (each := json.loads(line))["event"] not in unsure]
        else:
            read = [tomllib.loads(text) if path.name == "config.toml" else json.loads(text)]
        found[str(path.relative_to(folder))] = [lasting(record, without) for record in read]
    return found


def first_difference(before: Any, after: Any, where: str) -> str:
    """Describe the first difference, or return "" if there is none. Later versions may add fields."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        parts = {name: (part, after.get(name, "nothing")) for name, part in before.items()}
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        parts = dict(enumerate(zip(before, after, strict=True)))
    else:
        return "" if before == after else f"{where}: {before} before, {after} after"
    found = (first_difference(*pair, f"{where} {name}") for name, pair in parts.items())
    return next(filter(None, found), "")


def compare(case: Case, before: Version, after: Version, text: Path) -> list[str]:
    """Make the runs of a case, and return the cells of its row after the name.

    Raises:
        SystemError: if a run failed.
    """
    runs = [version.train(case, text, "run") for version in (before, after)]
    digests, losses = end(runs[0])
    wrong = [] if len(set(digests)) == 1 else [f"the processes of one run end with different digests: {digests}"]
    old, new = (contents(case, run) for run in runs)
    wrong += [found] if (found := first_difference(old, new, "in")) else []
    resumed = []
    if case.stop_after is not None:
        mine, theirs = (version.train(case, text, "stopped", *case.stop) for version in (after, before))
        ways = [("old", theirs, before), ("new", mine, after), ("old by new", theirs, after)]
        for name, stopped, version in ways:
            folder = runs[1].parent / f"resumed {name}"
            shutil.copytree(stopped, folder)
            version.resume(case, folder)
            if end(folder) == end(runs[name == "new"]):
                resumed.append(name)
            else:
                wrong.append(f"resumed {name}: ends differently")
    same = [one == other for one, other in zip((digests, losses), end(runs[1]), strict=True)]
    words = ["same" if part else "DIFFERENT" for part in same]
    return [digests[0][:12], words[0], f"{len(losses)} {words[1]}", ", ".join(resumed), "; ".join(wrong) or "same"]


def compare_transports(version: Version, text: Path, only: tuple[str, ...]) -> int:
    """Print a row of digests for each case, and return how many rows have different ones."""
    rows: list[list[str]] = []
    for cases in (cases for cases in OF_TRANSPORTS if cases[0].name.startswith(only)):
        cells, digests = dict.fromkeys(TRANSPORTS, ""), set[str]()
        for case in cases:
            folder = version.train(case, text, "run" if case.stop_after is None else "stopped", *case.stop)
            if case.stop_after is not None:
                version.resume(case, folder)
            found = set(end(folder)[0])
            cells[case.transport] = ", ".join(digest[:12] for digest in sorted(found))
            digests |= found
        rows.append([cases[0].name.partition(" over ")[0], *cells.values(), "yes" if len(digests) == 1 else "NO"])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(["", *TRANSPORTS, "equal"], rows))
    return sum(row[-1] != "yes" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_bits", description=__doc__)
    versions = parser.add_mutually_exclusive_group(required=True)
    versions.add_argument("--before", type=Path, help="checkout of the version to compare with")
    versions.add_argument("--transports", action="store_true", help="compare all transports instead of versions")
    parser.add_argument("--after", type=Path, default=HERE, help="checkout of the other version; default: this one")
    parser.add_argument("--only", nargs="*", default=[""], help="make only runs whose names begin with one of these")
    parser.add_argument("--work", type=Path, help="keep the runs in this folder, and reuse those of BEFORE")
    given = parser.parse_args(arguments)
    only = tuple(given.only)
    if not any(case.name.startswith(only) for case in (sum(OF_TRANSPORTS, ()) if given.transports else CASES)):
        parser.error(f"no run begins with {' or '.join(only)}")
    work: Path = given.work.resolve() if given.work else Path(tempfile.mkdtemp(prefix="same-bits-"))
    shutil.rmtree(work / "after", ignore_errors=True)
    if given.transports:
        version = Version(given.after, work / "after")
        failures = compare_transports(version, write_text(work / "text.jsonl"), only)
        version.close()
        return int(failures > 0)
    before, after = Version(given.before, work / "before"), Version(given.after, work / "after")
    text = write_text(work / "text.jsonl")
    print("| run | digest before | after | losses | same end when resumed | everything else |\n" + "|---" * 6 + "|")
    failures = 0
    for case in (case for case in CASES if case.name.startswith(only)):
        try:
            row = compare(case, before, after, text)
        except SystemError as error:
            row = ["FAILED", "", "", "", str(error)]
        failures += row[-1] != "same"
        print(f"| {case.name} | {' | '.join(row)} |", flush=True)
    for version in (before, after):
        version.close()
    print(f"\n{failures} runs differ." + (f" All runs are in {work}." if failures or given.work else ""))
    if not failures and given.work is None:
        shutil.rmtree(work)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
