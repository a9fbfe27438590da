"""Conversations as tokens, packed into rows.

A row is a training sequence, so no conversation is split. Its targets say which tokens the loss counts and where
conversations end.
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
from diloco.data.files import RowError, read_rows, usable, warn_once
from diloco.data.settings import DataSettings
from diloco.data.source import is_heldout
from diloco.errors import DataError
from diloco.model import ENDS, NOT_COUNTED

__all__ = ["PackedRows", "all_rows", "chat_rows", "pack_rows"]

_NOTES = {
    "bad": "left out because they can't be used (data.skip_bad)",
    "cut": "cut at {length} tokens",
    "unanswered": "left out because they have no answer to learn, or none before the cut",
    "special": "left out because their text contains a special token of the tokenizer",
    "partial": "in which not every answer counts, because the template renders earlier ones differently",
}
"""How conversations are changed or left out."""


def chat_rows(
    settings: DataSettings, tokenizer: ChatTokenizer, length: int
) -> tuple[PackedRows, PackedRows, Sequence[str]]:
    """Read, split and tokenise conversations: rows to train on, held-out ones, and what was cut or left out."""
    counts: Counter[str] = Counter()
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example, heldout in _examples(tokenizer, settings, length, counts):
        sides[heldout].append(example)
    changes = ((counts[name], note) for name, note in _NOTES.items())
    notes = [f"{count:,} {note.format(length=length)}" for count, note in changes if count]
    for side, use in zip(sides, ("train", "evaluate"), strict=True):
        if not side:
            raise DataError(
                f"Of {counts['read']} conversations, data.heldout_fraction={settings.heldout_fraction:g} leaves "
                f"none to {use} on ({'; '.join(notes)}). Give more conversations, or change the fraction."
            )
    train, heldout_part = (_rows(side, settings, tokenizer, length) for side in sides)
    return train, heldout_part, notes


def all_rows(settings: DataSettings, tokenizer: ChatTokenizer, length: int) -> PackedRows:
    """Return the rows of all conversations."""
    if not (examples := [example for example, _ in _examples(tokenizer, settings, length, Counter())]):
        raise DataError("There are no conversations to evaluate on.")
    return _rows(examples, settings, tokenizer, length)


def _rows(examples: Sequence[Example], settings: DataSettings, tokenizer: ChatTokenizer, length: int) -> PackedRows:
    return PackedRows(examples, length, padding=tokenizer.eos_id, together=settings.packing != "single")


def _examples(
    tokenizer: ChatTokenizer, settings: DataSettings, length: int, counts: Counter[str]
) -> Iterator[tuple[Example, bool]]:
    """Yield what is learned from each record, at most ``length`` tokens, and whether it is held out.

    Count the records, and by `_NOTES` what is left out or changed.
    """

    def read(place: str, record: Any) -> tuple[Example | str, bool]:
        text = json.dumps(record, sort_keys=True, default=str)
        return _example(tokenizer, place, record, counts), is_heldout(text, settings.heldout_fraction)

    bad: tuple[Example | str, bool] = "bad", False
    for example, heldout in usable(read_rows(settings.paths), read, bad, skip_bad=settings.skip_bad):
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


class PackedRows:
    """Rows of examples, which are the windows of a sampler.

    ``together`` packs as many examples into a row as fit, masked from each other; otherwise there is one per row. The
    token ``padding`` fills the rest of a row. It is never a target.

    >>> yes = np.array([False, True])
    >>> rows = PackedRows([Example(np.array([5, 6]), yes), Example(np.array([7, 8]), yes)], 4, padding=0)
    >>> rows.inputs.tolist(), rows.targets.tolist()
    ([[5, 6, 7, 8]], [[6, -101, 8, -101]])
    """

    def __init__(self, examples: Sequence[Example], length: int, *, padding: int, together: bool = True) -> None:
        sizes = [len(example.tokens) for example in examples]
        rows = pack_rows(sizes, length) if together else [[number] for number in range(len(sizes))]
        self.inputs = np.full((len(rows), length), padding, dtype=np.int32)  # ``(rows, length)``
        self.targets = np.full_like(self.inputs, NOT_COUNTED)  # the same; `ENDS` where the input ends its example
        for row, numbers in enumerate(rows):
            begin = 0
            for number in numbers:
                example, end = examples[number], begin + sizes[number]
                self.inputs[row, begin:end] = example.tokens
                self.targets[row, begin : end - 1] = np.where(
                    example.counted, self.inputs[row, begin:end], NOT_COUNTED
                )[1:]
                self.targets[row, end - 1] = ENDS
                begin = end
        self.documents, self.marks_ends = len(examples), together
        self.efficiency = sum(sizes) / self.inputs.size  # fraction of the tokens that are not padding
        self.counted_tokens = int((self.targets >= 0).sum())  # tokens that the loss counts

    @property
    def digest(self) -> str:
        """A hash of the tokens, of which of them count, and of the length of the rows."""
        digest = xxhash.xxh3_64(f"{self.inputs.shape} {self.marks_ends}".encode())
        digest.update(self.inputs.data)
        digest.update(self.targets.data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.inputs.size

    def num_windows(self, length: int) -> int:
        """Return the number of rows, which have this length."""
        assert length == self.inputs.shape[1]
        return len(self.inputs)

    def read(self, window: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Fill ``inputs`` and ``targets``, each ``(length,)``, with those of a row."""
        inputs[:], targets[:] = self.inputs[window], self.targets[window]


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
