"""``python -m benchmarks.parity.probes``: do models of equal loss do equally well?

A Streaming run and data-parallel runs of a lower and a higher loss are asked for more: bits per byte by kind of text,
copying, and what fine-tuning on other text and on sums makes of them. ``--table`` shows Streaming's figures beside what
a data-parallel run of its loss has, on the line between the two. A row of ``probes.jsonl`` is one run; rows that are
there are not run again.
"""

import argparse
import io
import json
import keyword
import math
import re
import sysconfig
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.markdown import table
from benchmarks.parity.stacked import LENGTH, Tensors, decoder, settings, train
from benchmarks.parity.stacked_runs import DATA_PARALLEL, SHORT, Run, each, rate
from diloco.data import Corpus, DataSettings, PackedTokens, build_corpus, heldout_windows

HERE = Path(__file__).parent
RUNS = each(SHORT, *(SHORT | DATA_PARALLEL | rate(r) for r in (5.6e-3, 8e-3)), seeds=(0, 1))
KINDS = ("comments", "strings", "numbers", "keywords", "common names", "rare names", "the rest")
RARE = 5  # a name that training has at most so often
WINDOWS, PROMPTS, COPIED = 2048, 256, 24  # held-out sequences; prompts of a probe; letters to copy
STEPS, BATCH, RATE = 100, 16, 1e-3  # of fine-tuning, with AdamW
Integers = NDArray[np.integer[Any]]


def kinds(document: bytes, common: set[str]) -> Integers:
    """Return the index in `KINDS` of each byte of a Python file; what can't be parsed is the rest."""
    found = np.full(len(document), len(KINDS) - 1)
    starts = np.cumsum([0, *map(len, document.splitlines(keepends=True))])
    lines = document.decode("utf-8", "replace").splitlines(keepends=True)

    def position(line: int, column: int) -> int:
        before = lines[line - 1][:column] if line <= len(lines) else ""
        return int(starts[min(line - 1, len(starts) - 1)]) + len(before.encode())

    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
            if (kind := kind_of(token, common)) is not None:
                found[position(*token.start) : position(*token.end)] = KINDS.index(kind)
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def kind_of(token: tokenize.TokenInfo, common: set[str]) -> str | None:
    whole = {tokenize.COMMENT: "comments", tokenize.STRING: "strings", tokenize.NUMBER: "numbers"}
    if token.type != tokenize.NAME:
        return whole.get(token.type)
    if keyword.iskeyword(token.string):
        return "keywords"
    return "common names" if token.string in common else "rare names"


def heldout_kinds(corpus: Corpus) -> tuple[Tensor, Tensor]:
    """Return held-out sequences, ``(WINDOWS, LENGTH + 1)``, and the kinds of their targets, ``(WINDOWS, LENGTH)``."""
    text, held = corpus.train, corpus.heldout
    assert isinstance(text, PackedTokens)  # no conversations
    assert isinstance(held, PackedTokens)
    words = re.findall(rb"[A-Za-z_]\w*", text[0 : len(text)].astype(np.uint8).tobytes())
    common = {word.decode() for word, number in Counter(words).items() if number > RARE}
    tokens = held[0 : len(held)]
    labels, first = np.full(len(tokens), len(KINDS) - 1), 0
    for end in np.flatnonzero(tokens == 256):
        labels[first:end] = kinds(tokens[first:end].astype(np.uint8).tobytes(), common)
        first = int(end) + 1
    chosen, length = heldout_windows(held, LENGTH, WINDOWS)
    places = chosen[:, None] * length + np.arange(length + 1)
    return torch.from_numpy(tokens[places].astype(np.int64)), torch.from_numpy(labels[places[:, 1:]])


def bits(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the bits of each byte of ``(n, length + 1)`` sequences but the first, ``(n, length)``."""
    with torch.no_grad():
        nats = [
            F.cross_entropy(model(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten(), reduction="none").view(
                len(some), -1
            )
            for some in torch.split(sequences, 64)
        ]
    return torch.cat(nats) / math.log(2)


def as_tokens(texts: list[str]) -> Tensor:
    return torch.tensor([list(text.encode()) for text in texts])


def copying(model: nn.Module) -> float:
    """Return the bits of each letter of a random word whose first four letters were repeated; 4.70 by chance."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (PROMPTS, COPIED), generator=generator).tolist()
    words = [bytes(each).decode() for each in letters]
    sequences = as_tokens([f'one = "{word}"\ntwo = "{word}"' for word in words])
    return float(bits(model, sequences)[:, -COPIED + 3 : -1].mean())


def sums(seed: int, number: int) -> list[str]:
    """Return lines of equal length with sums of numbers of two digits."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(10, 100, (number, 2), generator=generator).tolist()
    return [f"{one}+{two}={one + two:03}\n" for one, two in pairs]


def finetuned(model: nn.Module, text: bytes) -> nn.Module:
    """Train ``model`` on ``text`` with AdamW, and return it."""
    tokens, generator = torch.tensor(list(text)), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        starts = torch.randint(0, len(tokens) - LENGTH, (BATCH, 1), generator=generator)
        sequences = tokens[starts + torch.arange(LENGTH + 1)]
        optimizer.zero_grad()
        logits = model(sequences[:, :-1])
        torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten()))
        optimizer.step()
    return model


def probe(run: Run, parameters: Tensors, corpus: Corpus) -> dict[str, Any]:
    """Return the figures of a trained model."""

    def model() -> nn.Module:
        fresh = decoder(run)
        fresh.load_state_dict(parameters, strict=False)
        return fresh

    sequences, labels = heldout_kinds(corpus)
    of_each = bits(model(), sequences)
    by_kind = {kind: float(of_each[labels == index].mean()) for index, kind in enumerate(KINDS)}
    shares = {kind: float((labels == index).float().mean()) for index, kind in enumerate(KINDS)}
    headers = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["include"]).rglob("*.h")))
    held = len(headers) // 10
    test = torch.tensor(list(headers[-held:])).unfold(0, LENGTH + 1, LENGTH)[:PROMPTS]
    on_headers = finetuned(model(), headers[:-held])
    on_sums, questions = finetuned(model(), "".join(sums(0, 20_000)).encode()), as_tokens(sums(1, PROMPTS))
    with torch.no_grad():
        answers = on_sums(questions)[:, 5:8].argmax(-1)
    return {
        "bits_per_byte": float(of_each.mean()),
        "kinds": by_kind,
        "shares": shares,
        "copying": copying(model()),
        "headers_before": float(bits(model(), test).mean()),
        "headers_after": float(bits(on_headers, test).mean()),
        "kept_after_headers": float(bits(on_headers, sequences).mean()),
        "sums_bits": float(bits(on_sums, questions)[:, 5:8].mean()),
        "sums_right": float((answers == questions[:, 6:9]).all(1).float().mean()),
    }


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a line for each figure: for each seed Streaming's, and that of data-parallel training at its loss."""
    names = ["bits_per_byte", *KINDS, *list(rows[0])[list(rows[0]).index("copying") :]]
    cells: list[list[str]] = [[name] for name in names]
    for seed in sorted({row["run"].get("seed", 0) for row in rows}):
        mine = [row for row in rows if row["run"].get("seed", 0) == seed]
        streaming, *others = sorted(mine, key=lambda row: "algorithm" in row["run"])
        if len(others) == 2:
            losses = [row["heldout_loss"] for row in others]
            part = (streaming["heldout_loss"] - losses[0]) / (losses[1] - losses[0])
            for name, line in zip(names, cells, strict=True):
                one, first, second = ({**row, **row["kinds"]}[name] for row in (streaming, *others))
                line += [f"{one:.4f}", f"{first + part * (second - first):.4f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity.probes", description=__doc__)
    parser.add_argument("--rows", type=Path, default=HERE / "probes.jsonl", help="the file of the rows")
    parser.add_argument("--most", type=int, default=len(RUNS), help="number of rows to run at most")
    parser.add_argument("--table", action="store_true", help="print a table of the rows, and run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(map(json.loads, given.rows.read_text("utf-8").splitlines())) if given.rows.exists() else []
    if given.table:
        cells = lines(rows)
        print(table(["", *["Streaming", "data-parallel"] * (len(cells[0]) // 2)], cells))
        return
    known = [row["run"] for row in rows]
    missing = [run for run in RUNS if run.changes() not in known][: given.most]
    corpus = build_corpus(DataSettings())
    for run in missing:
        for row, parameters in train([run], corpus, "cpu"):
            figures = {"run": settings(row), "heldout_loss": row["heldout_loss"], **probe(run, parameters, corpus)}
            with given.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
