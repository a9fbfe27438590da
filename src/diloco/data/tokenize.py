"""Text into a folder of tokens, without holding all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from diloco.data.corpus import read_source, token_folders
from diloco.data.settings import DataSettings
from diloco.data.split import sides
from diloco.data.token_folder import TokenFolder
from diloco.data.token_writer import TokenWriter
from diloco.data.tokens import make_tokenizer
from diloco.errors import ConfigurationError

__all__ = ["tokenize"]

_BATCH_CHARACTERS = 4 << 20
"""Text that is tokenised at a time: enough for all threads of the tokenizers library."""


def tokenize(
    settings: DataSettings,
    place: Path,
    *,
    shard_tokens: int = 1 << 28,
    progress: Callable[[int, int], None] = lambda documents, size_bytes: None,
) -> TokenFolder:
    """Make a folder of tokens of the text that ``settings`` name; `build_corpus` of either is the same.

    The tokenizers library uses all cores (``TOKENIZERS_PARALLELISM=false`` forbids it). A BPE is trained on the text
    first, which is then read twice.

    Args:
        settings: of the text; what is about training on it means nothing here.
        place: the folder, not there yet, or empty.
        shard_tokens: a file ends with the document that makes it so long.
        progress: told documents and UTF-8 bytes so far, after each batch.

    Raises:
        DataError: the text cannot be read, or does not suffice for both sides, or the folder can't be written. Nothing
            is left of it.
        ConfigurationError: something asked for is not installed or unknown, or is there already.
    """
    sources = settings.parsed_sources()
    if len(sources) > 1:
        raise ConfigurationError(
            f"data.sources with {', '.join(source.name for source in sources)} was given; a folder for each of them, "
            "made one after the other with the same tokenizer, would work. Nothing was written."
        )
    (source,) = sources
    if token_folders(source):
        raise ConfigurationError(f"{source.data[0]} holds tokens already; text would work. Nothing was written.")

    def split() -> Iterator[tuple[str, bool]]:
        return sides(read_source(source), settings.heldout_fraction, settings.max_documents)

    tokenizer = make_tokenizer(settings, (text for text, heldout in split() if not heldout))
    writer = TokenWriter(place, tokenizer, shard_tokens)
    made = {
        "data": [str(each) for each in source.data] or ["the standard library"],
        "split": source.split,
        "tokenizer": settings.tokenizer,
        "heldout_fraction": settings.heldout_fraction,
        "max_documents": settings.max_documents,
    }
    waiting: dict[bool, list[str]] = {False: [], True: []}
    size = documents = size_bytes = 0
    with writer.writing(made):
        for text, heldout in split():
            waiting[heldout].append(text)
            size += len(text)
            documents += 1
            if size >= _BATCH_CHARACTERS:
                size_bytes += _write(writer, waiting)
                size = 0
                progress(documents, size_bytes)
        _write(writer, waiting)
    return TokenFolder(place)


def _write(writer: TokenWriter, waiting: dict[bool, list[str]]) -> int:
    before = writer.bytes
    for heldout, documents in waiting.items():
        if documents:
            writer.add("heldout" if heldout else "train", documents)
            documents.clear()
    return writer.bytes - before
