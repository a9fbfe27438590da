"""llama.cpp's files, as its own package `gguf` reads them."""

import re
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.real.running import WrongError


def gguf_facts(path: Path, export: Path) -> str:
    """Compare the tokens in a GGUF file with those of the export that it comes from, and return its figures.

    Raises:
        WrongError: if they differ.
    """
    from gguf import GGUFReader  # type: ignore[import-not-found]  # of PyPI, or beside the converter

    reader, tokenizer = GGUFReader(path), AutoTokenizer.from_pretrained(export, trust_remote_code=False)

    def value(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    for key in ("bos_token_id", "eos_token_id"):
        mine, theirs = value(key), getattr(tokenizer, key)
        if theirs is not None and mine != theirs:
            raise WrongError(f"{key} is {mine} in the file, {theirs} in the export")
    if len(value("tokens")) < len(tokenizer):
        raise WrongError(f"{len(value('tokens'))} tokens in the file, {len(tokenizer)} in the export")
    return (
        f"{len(reader.tensors)} tensors, {value('model')} with pre-tokenizer {value('pre')}, "
        f"eos {value('eos_token_id')}, adds a first token: {value('add_bos_token')}"
    )


def llama_cpp(converter: Path) -> str:
    """Return the name and version of what a converter came with."""
    found = re.search(r"llama_cpp_python-[\d.]+", str(converter))
    return f"llama.cpp of {found[0]}" if found else "llama.cpp"
