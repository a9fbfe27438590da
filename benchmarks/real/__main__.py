"""``python -m benchmarks.real GROUP``: try things that nobody here wrote, and write their rows and tables."""

import argparse
import subprocess
import tempfile
from pathlib import Path

from benchmarks.real import exports, loops, peers, rows, texts, tokenizers
from benchmarks.real.running import HERE
from benchmarks.real.trying import Tries

GROUPS = ("tokenizers", "texts", "loops", "exports", "peers")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__)
    parser.add_argument("group", choices=(*GROUPS, "tables"), help="what to try; tables: write the page alone")
    parser.add_argument("--only", nargs="*", default=[], help="names within the group")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "diloco-real", help="what is fetched"
    )
    parser.add_argument("--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--torchft", type=Path, help="a checkout of meta-pytorch/torchft")
    parser.add_argument("--exogym", type=Path, help="a checkout of exo-explore/gym")
    given = parser.parse_args()
    head = ["git", "-C", str(HERE), "log", "-1", "--format=%h", "--", "src"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    tries, work = Tries(given.group, commit), given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    converter = given.converter and given.converter.resolve()
    if given.group == "tokenizers":
        tokenizers.try_all(tries, work, given.only, converter)
    elif given.group == "texts":
        texts.try_all(tries, work, given.only)
    elif given.group == "loops":
        loops.try_all(tries, work, given.only, given.nanogpt and given.nanogpt.resolve())
    elif given.group == "exports":
        exports.try_all(tries, work, given.only, converter)
    elif given.group == "peers":
        peers.try_all(tries, given.torchft, given.exogym)
    rows.write([])
    return int(any(row.outcome == "FAILED" for row in tries.rows))


if __name__ == "__main__":
    raise SystemExit(main())
