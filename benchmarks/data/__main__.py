"""Speed of tokenising text, of opening a folder of tokens, and of gathering batches, compared with a plain copy.

    python -m benchmarks.data [--megabytes N] [--tokens N] [--repeats N] [--folder PATH]

Prints Markdown tables. Each batch is timed right after a copy of as many bytes as it has, and the ratio is the median
over these pairs, because a busy machine slows both. The folder contains random tokens, so that it can be larger than
the available text. It is read from the page cache, after a first pass. Start-up is timed in a new process each time,
from the end of the imports to the first batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from diloco.data import (
    ByteTokenizer,
    DataSettings,
    Sampler,
    TokenFolder,
    TokenWriter,
    open_stream,
    read_standard_library,
    tokenize,
)

START_UP = """
import time
from pathlib import Path
from diloco.data.corpus import build_corpus
from diloco.data.sampler import Sampler
from diloco.data.settings import DataSettings
imported_s, computed_s = time.perf_counter(), time.process_time()
corpus = build_corpus(DataSettings(paths=(Path({path!r}),), tokenizer={tokenizer!r}))
Sampler(corpus.train, sequence_length=1024, batch_size=8, replica=0, num_replicas=1, seed=0).next_batch()
print(time.perf_counter() - imported_s, time.process_time() - computed_s)
"""

SHAPES = ((8, 128), (16, 1024), (64, 1024), (32, 4096))
"""Pairs of (batch size, sequence length)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=16, help="megabytes of text to tokenise")
    parser.add_argument("--tokens", type=int, default=200_000_000, help="tokens in the folder of the batches")
    parser.add_argument("--repeats", type=int, default=200, help="number of batches of each shape")
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder for a temporary folder; default: the system's"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        machine = platform.processor() or platform.machine()
        print(f"{machine}, Python {platform.python_version()}, NumPy {np.__version__}\n")
        text = write_text(folder / "text.jsonl", given.megabytes * 1_000_000)
        tokenising(folder, text)
        tokens = write_tokens(folder / "large", given.tokens)
        gathering(tokens, given.repeats)
        start_up(folder, text)


def write_text(path: Path, size_bytes: int) -> Path:
    """Write the standard library repeatedly, one document per line, with the number of the copy in each document."""
    written, copy = 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size_bytes:
            for document in read_standard_library():
                written += file.write(json.dumps({"text": f"# copy {copy}\n{document}"}) + "\n")
                if written >= size_bytes:
                    break
            copy += 1
    return path


def tokenising(folder: Path, text: Path) -> None:
    """Print the MB of text tokenised per second, from the file to the folder of tokens."""
    print("| tokenizer | text, MB | tokens | seconds | MB/s | MB per second of one core |\n|---|---|---|---|---|---|")
    bpe = folder / "bpe"
    tokenize(DataSettings(tokenizer="bpe", bpe_vocab_size=8192, bpe_documents=100), bpe)
    for name, tokenizer in (("bytes", "bytes"), ("BPE, 8,192 ids", str(bpe))):
        place = folder / f"tokens-{name[:3]}"
        watch = Watch()
        made = tokenize(DataSettings(paths=(text,), tokenizer=tokenizer), place)
        watch.stop()
        size = sum(split.bytes for split in made.splits.values())
        print(watch.row(name, size, sum(split.tokens for split in made.splits.values())))
    stream = open_stream(DataSettings(paths=(text,), tokenizer=str(bpe), streaming=True))
    batches = stream.batches(seed=0, sequence_length=1024, batch_size=16, replica=0, num_replicas=1)
    watch, size = Watch(), 0
    for _ in range(100):
        size += stream.tokenizer.num_bytes(batches.next_batch()[1])
    watch.stop()
    print(watch.row("BPE, streamed into batches", size, 100 * 16 * 1024) + "\n")


class Watch:
    """Measures wall-clock time, and the processor time of this process on all cores."""

    def __init__(self) -> None:
        self.seconds, self.computed_s = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Stop both clocks."""
        self.seconds, self.computed_s = time.perf_counter() - self.seconds, time.process_time() - self.computed_s

    def row(self, name: str, size: int, tokens: int) -> str:
        """Return a line of the table for ``size`` bytes of text."""
        rates = f"{size / 1e6 / self.seconds:.1f} | {size / 1e6 / self.computed_s:.1f}"
        return f"| {name} | {size / 1e6:.1f} | {tokens:,} | {self.seconds:.2f} | {rates} |"


def write_tokens(path: Path, count: int) -> TokenFolder:
    """Write a folder of random tokens."""

    class Random(ByteTokenizer):
        """Ignores the documents and returns a fixed number of random tokens."""

        def encode_documents(self, documents: object) -> np.ndarray:
            tokens = rng.integers(0, 256, chunk, dtype=np.uint16)
            tokens[4095::4096] = self.eos_id
            tokens[-1] = self.eos_id
            return tokens

    rng, chunk = np.random.default_rng(0), 1 << 22
    writer = TokenWriter(path, Random(), 1 << 26)
    with writer.writing({}):
        for _ in range(max(1, count // chunk)):
            writer.add([("", False)])
        writer.add([("", True)])
    return TokenFolder(path)


def gathering(folder: TokenFolder, repeats: int) -> None:
    """Print the tokens per second of random batches, compared with copies of as many bytes."""
    tokens = folder.tokens("train")
    assert sum(int(piece[::2048].sum()) for piece in tokens.pieces) > 0, "first pass, which fills the page cache"
    in_memory = np.concatenate(tokens.pieces)
    print(f"{len(tokens):,} tokens in {len(tokens.pieces)} files, {len(tokens) * 2 / 1e6:,.0f} MB\n")
    print("| batch | from | tokens/s, millions | batch, ms | times a copy | spread |\n|---|---|---|---|---|---|")
    for batch_size, length in SHAPES:
        for name, array in (("memory", in_memory), ("files", tokens)):
            sampler = Sampler(array, sequence_length=length, batch_size=batch_size, replica=0, num_replicas=1, seed=0)
            source = np.ones(2 * batch_size * length, dtype=np.int64)
            target = np.empty_like(source)
            times = list(paired(sampler.next_batch, partial(np.copyto, target, source), repeats))
            median_s = statistics.median(gather for gather, _ in times)
            ratios = sorted(gather / copy for gather, copy in times)
            spread = f"{ratios[len(ratios) // 10]:.1f}-{ratios[-len(ratios) // 10]:.1f}"
            rate = batch_size * length / median_s / 1e6
            print(f"| {batch_size} x {length} | {name} | {rate:.0f} | {median_s * 1e3:.3f} "
                  f"| {statistics.median(ratios):.1f} | {spread} |")  # fmt: skip
    print()


def paired(one: Callable[[], object], other: Callable[[], object], repeats: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each of two alternating functions."""
    for _ in range(repeats):
        started_s = time.perf_counter()
        other()
        between_s = time.perf_counter()
        one()
        yield time.perf_counter() - between_s, between_s - started_s


def start_up(folder: Path, text: Path) -> None:
    """Print the seconds from the end of the imports to the first batch."""
    print("| start with | seconds to the first batch | processor time |\n|---|---|---|")
    bpe = str(folder / "bpe")
    rows = (
        ("text, bytes", text, "bytes"),
        ("text, BPE", text, bpe),
        ("folder of the same, BPE", folder / "tokens-BPE", "bytes"),
        ("folder, large", folder / "large", "bytes"),
    )
    for name, path, tokenizer in rows:
        code = START_UP.format(path=str(path), tokenizer=tokenizer)
        runs = []
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
            runs.append([float(word) for word in done.stdout.split()])
        seconds, computed_s = map(min, zip(*runs, strict=True))
        print(f"| {name} | {seconds:.3f} | {computed_s:.3f} |")


if __name__ == "__main__":
    main()
