"""Runs small enough for tests: a two-layer model on generated text."""

import json
import random
from hashlib import sha512
from pathlib import Path
from typing import Any

from diloco.config import Configuration, to_toml
from diloco.events import Event
from diloco.train import resolve, run_training
from tests.command_lines import load_configuration

SMALL = (
    "--model.arguments {layers=2,width=16,ffn_width=32,heads=2} --sequence-length 16 "
    "--batch-size 2 --learning-rate 1e-2 --optimizer.warmup-steps 2 --data-parallel-steps 0 --replicas 2 "
    "--steps 12 --inner-steps 4 --fragments 3 --overlap-steps 2 --evaluation.every-steps 0 --evaluation.sequences 8 "
    "--evaluation.sample-prompts --checkpoint.every-steps 0 --device cpu --data"
)


def of_torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank that torchrun starts, whose store is at ``port`` of this machine."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    numbers |= {"MASTER_PORT": port}
    where = {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1"}
    return where | {name: str(number) for name, number in numbers.items()}


class Listener:
    """A sink that records its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def write_text(folder: Path, *, documents: int = 40, seed: int = 0) -> Path:
    """Write a .jsonl file of short documents with a learnable structure."""
    rng = random.Random(seed)
    path = folder / "text.jsonl"
    words = ["alpha", "beta", "gamma", "delta"]
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            text = " ".join(rng.choice(words) for _ in range(30)) + f" {number}."
            file.write(json.dumps({"text": text}) + "\n")
    return path


def numbered(count: int, *, prefix: str = "", longest: int = 30) -> list[str]:
    """Return documents of many lengths, all different; some of them are held out."""
    return [f"{prefix}<{n}:{sha512(bytes([n % 256])).hexdigest() * 2:.{n * 7 % longest}}>" for n in range(count)]


def settings_of(data: Path, arguments: str = "", file: Path | None = None) -> Configuration:
    """Return the settings of `SMALL` and more arguments, and of a file, as `diloco train` resolves them."""
    configuration = load_configuration([*([str(file)] if file else []), *SMALL.split(), str(data), *arguments.split()])
    return resolve(configuration, num_layers=configuration.model.decoder.layers)


def train(
    data: Path, out: Path, arguments: str = "", *, sink: Listener | None = None, file: Path | None = None
) -> dict[str, Any]:
    """Train as `diloco train` does, without console output, and return the summary."""
    settings = settings_of(data, arguments, file)
    return dict(run_training(settings, folder=out, sink=sink or Listener(), config_toml=to_toml(settings)))
