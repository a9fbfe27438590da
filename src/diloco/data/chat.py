"""The corpus of a chat fine-tuning run: conversations as tokens, packed into rows.

A row is a training sequence, so no conversation is split. Marks say which tokens the loss counts and where
conversations end. To a sampler, the rows are the windows of packed tokens.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.chat_tokenizer import ChatTokenizer, Example
from diloco.data.conversations import read_conversation, texts_of
from diloco.data.corpus import Corpus, fingerprint_of
from diloco.data.files import RowError, read_rows, usable, warn_once
from diloco.data.packed import PackedTokens
from diloco.data.settings import DataSettings
from diloco.data.source import is_heldout
from diloco.errors import ConfigurationError, DataError
from diloco.model import ENDS, NOT_COUNTED

__all__ = ["PackedRows", "build_chat_corpus", "heldout_rows", "pack_rows"]

_NOTES = {
    "bad": "left out because they can't be used (data.skip_bad)",
    "cut": "cut at {length} tokens",
    "unanswered": "left out because they have no answer to learn, or none before the cut",
    "special": "left out because their text contains a special token of the tokenizer",
    "partial": "in which not every answer counts, because the template renders earlier ones differently",
}
"""How conversations are changed or left out."""


def build_chat_corpus(settings: DataSettings, sequence_length: int) -> Corpus:
    """Read, split and tokenise the conversations that ``settings`` name, in rows of ``sequence_length`` tokens."""
    if settings.tokenizer == "bytes" or settings.bpe_vocab_size is not None:
        raise ConfigurationError(
            f"data.format='chat' needs the tokenizer of a model, not {settings.tokenizer!r}. Give a model folder as "
            "--model or data.tokenizer."
        )
    tokenizer = ChatTokenizer(settings.tokenizer, settings.chat_template)
    counts: Counter[str] = Counter()
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example, heldout in _examples(tokenizer, settings, sequence_length, settings.paths, counts):
        sides[heldout].append(example)
    changes = ((counts[name], note) for name, note in _NOTES.items())
    notes = [f"{count:,} {note.format(length=sequence_length)}" for count, note in changes if count]
    for side, use in zip(sides, ("train", "evaluate"), strict=True):
        if not side:
            raise DataError(
                f"Of {counts['read']} conversations, data.heldout_fraction={settings.heldout_fraction:g} leaves "
                f"none to {use} on ({'; '.join(notes)}). Give more conversations, or change the fraction."
            )
    train, heldout_part = (_rows(side, settings, tokenizer, sequence_length) for side in sides)
    size = (
        f"{train.documents:,} conversations in {len(train) // sequence_length:,} rows of {sequence_length} tokens, "
        f"{train.efficiency:.0%} full; {train.counted_tokens:,} tokens count"
    )
    about = "; ".join([size, *notes, f"held out: {heldout_part.documents:,} conversations"])
    return Corpus(train, heldout_part, tokenizer, fingerprint_of(tokenizer, train, heldout_part), about=about)


def heldout_rows(
    settings: DataSettings, tokenizer: ChatTokenizer, sequence_length: int, paths: Sequence[str] = ()
) -> PackedRows:
    """Return the rows that `build_chat_corpus` holds out, or all conversations of ``paths``."""
    examples = _examples(tokenizer, settings, sequence_length, paths or settings.paths, Counter())
    chosen = [example for example, heldout in examples if paths or heldout]
    if not chosen:
        raise DataError("There are no conversations to evaluate on.")
    return _rows(chosen, settings, tokenizer, sequence_length)


def _rows(examples: Sequence[Example], settings: DataSettings, tokenizer: ChatTokenizer, length: int) -> PackedRows:
    together = settings.packing != "single"
    return PackedRows(examples, length, padding=tokenizer.eos_id, together=together, dtype=tokenizer.dtype)


def _examples(
    tokenizer: ChatTokenizer, settings: DataSettings, length: int, paths: Sequence[str], counts: Counter[str]
) -> Iterator[tuple[Example, bool]]:
    """Yield what is learned from each record, at most ``length`` tokens, and whether it is held out.

    Count the records, and by `_NOTES` what is left out or changed.
    """

    def read(place: str, record: Any) -> tuple[Example | str, bool]:
        text = json.dumps(record, sort_keys=True, default=str)
        return _example(tokenizer, place, record, counts), is_heldout(text, settings.heldout_fraction)

    bad: tuple[Example | str, bool] = "bad", False
    for example, heldout in usable(read_rows(paths), read, bad, skip_bad=settings.skip_bad):
        counts["read"] += 1
        if isinstance(example, str):
            counts[example] += 1
        elif not (short := Example(example.tokens[:length], example.counted[:length])).counted.any():
            counts["unanswered"] += 1
        else:
            counts["cut"] += len(short.tokens) < len(example.tokens)
            yield short, heldout


def _example(tokenizer: ChatTokenizer, place: str, record: Any, counts: Counter[str]) -> Example | str:
    """Tokenise a record. If there is nothing to learn from it, return why, as one of `_NOTES`."""
    conversation = read_conversation(place, record)
    for name in sorted(conversation.unused):
        if not counts[f"unused {name}"]:  # each is named once
            warn_once(f"{place}: the field {name!r} is not used.")
        counts[f"unused {name}"] += 1
    if (text := conversation.text) is not None:
        return "special" if tokenizer.holds_special(text) else tokenizer.text(text)
    if any(map(tokenizer.holds_special, texts_of([conversation.messages, conversation.tools]))):
        return "special"
    size = max((number + 1 for number, learned in enumerate(conversation.learned) if learned), default=0)
    messages, learned = conversation.messages[:size], conversation.learned[:size]
    if not messages:
        return "unanswered"
    try:
        example, all_count = tokenizer.conversation(messages, learned, conversation.tools)
    except DataError as error:
        if tokenizer.template is None:
            raise
        raise RowError(f"{place}: {error}") from error
    counts["partial"] += not all_count
    return example


class PackedRows(PackedTokens):
    """Rows of examples, as packed tokens whose windows of ``length`` are the rows.

    ``together`` packs as many examples into a row as fit, masked from each other; otherwise there is one per row. The
    token ``padding`` fills the rest of a row. It is never a target.

    >>> yes = np.array([False, True])
    >>> rows = PackedRows([Example(np.array([5, 6]), yes), Example(np.array([7, 8]), yes)], 4, padding=0)
    >>> targets = rows[1:5].astype(np.int64)
    >>> rows.mark(1, targets)
    >>> rows[0:4].tolist(), targets.tolist()
    ([5, 6, 7, 8], [6, -101, 8, -101])
    """

    def __init__(
        self,
        examples: Sequence[Example],
        length: int,
        *,
        padding: int,
        together: bool = True,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        sizes = [len(example.tokens) for example in examples]
        rows = pack_rows(sizes, length) if together else [[number] for number in range(len(sizes))]
        tokens = np.full(len(rows) * length + 1, padding, dtype=dtype or np.dtype(np.uint32))
        self._counted = np.zeros(len(tokens), dtype=np.bool_)
        self._last = np.zeros(len(tokens), dtype=np.bool_)
        for row, numbers in enumerate(rows):
            place = row * length
            for number in numbers:
                end = place + sizes[number]
                tokens[place:end] = examples[number].tokens
                self._counted[place + 1 : end] = examples[number].counted[1:]
                self._last[end - 1] = True
                place = end
        super().__init__([tokens], documents=len(examples))
        self.length = length
        self.marks_ends = together
        self.efficiency = sum(sizes) / (len(tokens) - 1)  # fraction of the tokens that are not padding
        self.counted_tokens = int(self._counted.sum())  # tokens that the loss counts

    @property
    def digest(self) -> str:
        """A hash of the tokens, of which of them count, and of the length of the rows."""
        digest = xxhash.xxh3_64(f"{super().digest} {self.length} {self.marks_ends}".encode())
        for marks in (self._counted, self._last):
            digest.update(np.packbits(marks).data)
        return digest.hexdigest()

    def mark(self, begin: int, targets: NDArray[np.int64]) -> None:
        end = begin + len(targets)
        targets[~self._counted[begin:end]] = NOT_COUNTED
        targets[self._last[begin - 1 : end - 1]] = ENDS


def pack_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return which items of these sizes go into each row of ``length``: best fit, largest first.

    >>> pack_rows([3, 2, 6, 4, 1], length=6)
    [[2], [3, 1], [0, 4]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free space, row number), ascending
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        place = bisect_left(room, (sizes[number], -1))
        if place == len(room):
            rows.append([])
            free, row = length, len(rows) - 1
        else:
            free, row = room.pop(place)
        rows[row].append(number)
        if free > sizes[number]:
            insort(room, (free - sizes[number], row))
    return rows
