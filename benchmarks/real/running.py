"""Fetch packages, run commands of the package and foreign scripts, and judge how they ended."""

import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parents[2]
LIMIT_S = 900
SERVER = """
import json, os, sys, traceback
replies = os.dup(1)
from diloco.cli import main
for line in sys.stdin:
    words, *outputs = json.loads(line)
    for number, output in enumerate(outputs, start=1):
        opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number), os.close(opened)
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        code = traceback.print_exc() or 1
    sys.stdout.flush(), sys.stderr.flush()
    os.write(replies, f"{code}\\n".encode())
"""


class RefusedError(Exception):
    """A command ended with a sentence before it trained."""


class WrongError(Exception):
    """A command ended otherwise, or gave wrong values."""


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which the package is this one, nothing is fetched, and one thread computes."""
    paths = os.pathsep.join([str(HERE / "src"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | offline | more


class Diloco:
    """A process that runs commands of the package one after the other in ``folder``, so that imports cost once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commands, self.output = folder, list[str](), ""
        folder.mkdir(parents=True, exist_ok=True)
        self.server = self._start()

    def _start(self) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, "-c", SERVER], cwd=self.folder, env=environment(), text=True, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.kill()
        self.server.wait()

    def __call__(self, line: str, *words: str) -> str:
        """Run ``diloco LINE WORDS...`` and return what it printed. A line is divided at blanks.

        ``output`` is then its standard output alone.

        Raises:
            RefusedError: if it ended with a sentence.
            WrongError: if it ended otherwise, or took longer than `LIMIT_S`.
        """
        if self.server.poll() is not None:  # it was killed, or a command ended it
            self.server = self._start()
        assert self.server.stdin
        assert self.server.stdout
        arguments, output, errors = [*line.split(), *words], self.folder / "output.txt", self.folder / "errors.txt"
        self.commands.append(" ".join(["diloco", *line.split(), *(repr(word) for word in words)]))
        print(json.dumps([arguments, str(output), str(errors)]), file=self.server.stdin, flush=True)
        if not select.select([self.server.stdout], [], [], LIMIT_S)[0]:
            self.server.kill()
            self.server.wait()
            raise WrongError(f"took longer than {LIMIT_S} s")
        code = self.server.stdout.readline().strip()
        self.output = output.read_text("utf-8", "replace")
        return judged(code, self.output + errors.read_text("utf-8", "replace"))

    def said(self) -> str:
        """Return the commands since the last call."""
        said, self.commands = "; ".join(self.commands), []
        return said


def judged(code: str, printed: str) -> str:
    """Return what a process printed, if its exit code is 0.

    Raises:
        RefusedError: if the package has said why it did not start.
        WrongError: if it ended otherwise.
    """
    if code == "0":
        return printed
    lines = [line.strip() for line in printed.strip().splitlines() if line.strip()] or ["(nothing printed)"]
    if "Traceback" in printed or not code:
        raise WrongError(lines[-1][:400])
    sentence = " ".join(printed[printed.rfind("diloco: ") :].removeprefix("diloco: ").split())
    trained = re.search(r"^ *[\d,]+ */ *[\d,]+\b", printed, re.MULTILINE)
    raise (WrongError if trained else RefusedError)(sentence[:400])


def run(commands: Sequence[Sequence[str]], folder: Path, **variables: str) -> list[str]:
    """Run processes of Python at the same time, and return what each printed.

    Raises:
        RefusedError, WrongError: as `judged`, for the first process that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [folder / f"output-{number}.txt" for number in range(len(commands))]
    started = []
    for words, output in zip(commands, outputs, strict=True):
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=environment(**variables), stdout=file, stderr=file
            )
        started.append(process)
    try:
        codes = [str(process.wait(LIMIT_S)) for process in started]
    except subprocess.TimeoutExpired as error:
        raise WrongError(f"took longer than {LIMIT_S} s") from error
    finally:
        for process in started:
            process.kill()
    pairs = [(code, output.read_text("utf-8", "replace")) for code, output in zip(codes, outputs, strict=True)]
    for code, printed in sorted(pairs, key=lambda pair: "Traceback" not in pair[1]):
        if code != "0":
            raise WrongError(last_error(printed))
    return [printed for _, printed in pairs]


def last_error(printed: str) -> str:
    """Return the last line that names an error, or the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()] or ["(nothing printed)"]
    errors = [line for line in lines if re.match(r"(\[rank\d\]: ?)?[\w.]*(Error|Exception)\b", line)]
    own = [line for line in errors if "ChildFailedError" not in line]  # torchrun's, which follows the ranks' errors
    return (own or errors or lines)[-1][:400]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def patched(source: Path, target: Path, changes: Mapping[str, str]) -> None:
    """Write ``source`` to ``target`` with these texts replaced.

    Raises:
        LookupError: if a text is not there exactly once.
    """
    text = source.read_text("utf-8")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise LookupError(f"{source} has {old!r} {text.count(old)} times. Use the commit that README.md names.")
        text = text.replace(old, new)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")


def npm_package(name: str, folder: Path) -> tuple[Path, str]:
    """Fetch an npm package into ``folder``, and return the folder of its files and its name and version."""
    place = folder / "npm" / name.replace("/", "+")
    if not place.exists():
        archives = place.with_suffix(".fetched")
        archives.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", name], cwd=archives, check=True, capture_output=True)
        with tarfile.open(next(archives.glob("*.tgz"))) as archive:
            archive.extractall(place, filter="data")
        shutil.rmtree(archives)
    return place / "package", f"{name} {json.loads((place / 'package/package.json').read_text())['version']}"


def python_package(name: str, folder: Path, *, source: bool = False) -> tuple[Path, str]:
    """Fetch a package of PyPI into ``folder``, without installing it, and return its files and its name and version."""
    place = folder / "pypi" / name
    if not place.exists():
        archives = place.with_suffix(".fetched")
        words = ["download", "--quiet", "--no-deps", "--dest", str(archives), name]
        words += ["--no-binary", name] if source else []
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True)
        archive = next(archives.iterdir())
        (place / archive.name).mkdir(parents=True)
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(place / archive.name)
        else:
            with tarfile.open(archive) as sdist:
                sdist.extractall(place / archive.name, filter="data")
        shutil.rmtree(archives)
    unpacked = next(place.iterdir())
    number = re.search(r"-(\d[\w.]*?)(-|\.tar|\.zip|$)", unpacked.name)
    return unpacked, f"{name} {number[1] if number else ''}"
