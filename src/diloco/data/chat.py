"""Read conversations from records and build the corpus of a chat fine-tuning run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from diloco.data.chat_tokenizer import ChatTokenizer, Message
from diloco.data.conversations import read_conversation, texts_of
from diloco.data.corpus import Corpus, fingerprint_of
from diloco.data.rows import Example, PackedRows, fitting
from diloco.data.settings import DataSettings
from diloco.data.text import Row, RowError, is_heldout, read_records, usable, warn_once
from diloco.errors import ConfigurationError, DataError

__all__ = ["build_chat_corpus", "chat_tokenizer", "heldout_rows"]


def chat_tokenizer(settings: DataSettings) -> ChatTokenizer:
    """Return the tokenizer that ``settings`` name, with its chat template.

    Raises:
        ConfigurationError: ``data.tokenizer`` does not name the tokenizer of a model.
        DataError: as `ChatTokenizer`.
    """
    if settings.tokenizer == "bytes" or settings.bpe_vocab_size is not None:
        raise ConfigurationError(
            f"data.format='chat' needs the tokenizer of a model, not {settings.tokenizer!r}. Give a model folder as "
            "--model or data.tokenizer."
        )
    return ChatTokenizer(settings.tokenizer, settings.chat_template)


def build_chat_corpus(settings: DataSettings, sequence_length: int) -> Corpus:
    """Read, split and tokenise the conversations that ``settings`` name, in rows of ``sequence_length`` tokens.

    Raises:
        DataError: the conversations cannot be read, or do not suffice for both splits.
        ConfigurationError: ``data.tokenizer`` does not name the tokenizer of a model.
    """
    tokenizer = chat_tokenizer(settings)
    rows: Iterable[Row] = read_records(settings.paths)
    if settings.max_documents is not None:
        rows = sorted(rows, key=lambda row: xxhash.xxh3_64_intdigest(_text_of(row[1]).encode()))
        rows = rows[: settings.max_documents]
    split: dict[bool, list[Example]] = {False: [], True: []}
    reader = _Reader(tokenizer)
    for example, heldout in reader.examples(rows, settings):
        if example is not None:
            split[heldout].append(example)
    packed = {}
    for heldout, examples in split.items():
        kept, cut, unfit = fitting(examples, sequence_length)
        reader.counts.update(cut=cut, unanswered=unfit)
        if not kept:
            why = "; ".join(reader.notes(sequence_length))
            raise DataError(
                f"Of {reader.counts['read']} conversations, data.heldout_fraction={settings.heldout_fraction:g} leaves "
                f"none to {'evaluate' if heldout else 'train'} on{f' ({why})' if why else ''}. Give more "
                "conversations, or change the fraction."
            )
        packed[heldout] = _rows_of(kept, settings, tokenizer, sequence_length)
    train, held_out = packed[False], packed[True]
    counts = (
        f"{train.documents:,} conversations in {len(train) // sequence_length:,} rows of {sequence_length} tokens, "
        f"{train.efficiency:.0%} full; {train.counted_tokens:,} tokens count"
    )
    about = "; ".join([counts, *reader.notes(sequence_length), f"held out: {held_out.documents:,} conversations"])
    return Corpus(train, held_out, tokenizer, fingerprint_of(tokenizer, train, held_out), about=about)


def heldout_rows(
    settings: DataSettings, tokenizer: ChatTokenizer, sequence_length: int, paths: Sequence[Path] = ()
) -> PackedRows:
    """Return the rows that `build_chat_corpus` holds out, or all conversations of ``paths``.

    Raises:
        DataError: the conversations can't be read, or there are none to evaluate on.
    """
    examples = _Reader(tokenizer).examples(read_records(paths or settings.paths), settings)
    read = (example for example, heldout in examples if example is not None and (paths or heldout))
    kept, _, _ = fitting(read, sequence_length)
    return _rows_of(kept, settings, tokenizer, sequence_length)


def _rows_of(examples: list[Example], settings: DataSettings, tokenizer: ChatTokenizer, length: int) -> PackedRows:
    return PackedRows(
        examples, length, padding=tokenizer.eos_id, together=settings.packing != "single", dtype=tokenizer.dtype
    )


_NOTES = {
    "bad": "left out because they can't be used (data.skip_bad)",
    "cut": "cut at {length} tokens",
    "unanswered": "left out because they have no answer to learn, or none before the cut",
    "special": "left out because their text contains a special token of the tokenizer",
    "partial": "in which not every answer counts, because the template renders earlier ones differently",
}
"""How conversations are changed or left out."""


class _Reader:
    """Turns records into examples, and counts and names what it leaves out."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.counts: Counter[str] = Counter()  # of `_NOTES`, and how many were read
        self._tokenizer = tokenizer
        self._known: set[str] = set()  # parts of conversations that the template uses, or that were named

    def notes(self, length: int) -> tuple[str, ...]:
        counted = ((self.counts[name], what.format(length=length)) for name, what in _NOTES.items())
        return tuple(f"{count:,} {what}" for count, what in counted if count)

    def examples(self, rows: Iterable[Row], settings: DataSettings) -> Iterator[tuple[Example | None, bool]]:
        """Yield what is learned from each record, or None, and whether it is held out.

        Raises:
            RowError: a record can't be used, and ``settings.skip_bad`` is False.
        """

        def read(place: str, record: Any) -> tuple[Example | None, bool]:
            return self._example(place, record), is_heldout(_text_of(record), settings.heldout_fraction)

        used: Iterator[tuple[Example | None, bool] | None] = usable(rows, read, None, skip_bad=settings.skip_bad)
        for each in used:
            self.counts["read"] += 1
            self.counts["bad"] += each is None
            yield each or (None, False)

    def _example(self, place: str, record: Any) -> Example | None:
        """Tokenise a record. If there is nothing to learn from it, return None and count why."""
        tokenizer, conversation = self._tokenizer, read_conversation(place, record)
        for part in sorted(conversation.unused):
            self._name(place, part, "is not used")
        if conversation.text is not None:
            if tokenizer.holds_special(conversation.text):
                self.counts["special"] += 1
                return None
            return tokenizer.completion("", conversation.text)
        if any(map(tokenizer.holds_special, texts_of([list(conversation.messages), conversation.arguments]))):
            self.counts["special"] += 1
            return None
        size = max((number + 1 for number, learned in enumerate(conversation.learned) if learned), default=0)
        messages, learned, more = conversation.messages[:size], conversation.learned[:size], conversation.arguments
        if not messages:
            self.counts["unanswered"] += 1
            return None
        if tokenizer.template is None and not conversation.needs_template:
            for name in sorted(more):
                self._name(place, f"the field {name!r}", "needs a chat template and is not used")
            return tokenizer.completion(_joined(messages[:-1]), _joined(messages[-1:]))
        try:
            example, all_count = tokenizer.conversation(messages, learned, more)
            for part, is_unused in tokenizer.unused(messages, self._known, more):
                self._known.add(part)
                if is_unused:
                    warn_once(f"{place}: the chat template leaves out {part}.")
        except DataError as error:
            if tokenizer.template is None:
                raise
            raise RowError(f"{place}: {error}") from error
        self.counts["partial"] += not all_count
        return example

    def _name(self, place: str, part: str, how: str) -> None:
        if part not in self._known:
            self._known.add(part)
            warn_once(f"{place}: {part} {how}.")


def _joined(messages: Iterable[Message]) -> str:
    return "\n\n".join(str(message.get("content", "")) for message in messages)


def _text_of(record: Any) -> str:
    """Return the text of a record by which it is held out or selected."""
    return "" if isinstance(record, RowError) else json.dumps(record, sort_keys=True, default=str)
