"""``diloco tokenize``: turn text into a folder of packed tokens, which training maps into memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from diloco.config import parse_options
from diloco.data import DataSettings
from diloco.units import format_bytes
from diloco.waiting import waiting_for


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """Turn text into a folder of packed tokens, for `diloco train --data FOLDER`.

    Documents are read one at a time, so the text may be larger than memory.

    Examples:
      diloco tokenize --data books/ --out books-tokens
      diloco tokenize --data hf:allenai/c4/en --tokenizer hf:gpt2 --out c4-tokens
    """

    out: Annotated[Path, arg(aliases=["-o"])]
    """Folder to create."""
    data: DataSettings = field(default_factory=DataSettings)


def run_tokenize(arguments: Sequence[str]) -> int:
    """Tokenise the text and print a summary."""
    settings: TokenizeOptions = parse_options(TokenizeOptions, "tokenize", arguments)

    from diloco.data import tokenize

    started_s = time.monotonic()

    def speed(size_bytes: int) -> str:
        return f"{size_bytes / 1e6 / max(1e-9, time.monotonic() - started_s):.1f} MB/s"

    read = [(0, 0)]  # numbers of documents and bytes so far
    with waiting_for(lambda: f"the text, with {read[-1][0]:,} documents ({speed(read[-1][1])}) read,"):
        folder = tokenize(settings.data, settings.out, progress=lambda *numbers: read.append(numbers))
    for name, split in folder.splits.items():
        print(f"{name:8} {split.documents:,} documents, {format_bytes(split.num_bytes)}, {len(split):,} tokens")
    text = speed(sum(split.num_bytes for split in folder.splits.values()))
    print(f"{settings.out}: {folder.vocab_size:,} ids, {time.monotonic() - started_s:.1f} s, {text}")
    return 0
