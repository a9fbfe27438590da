"""Read conversations from records and build the corpus of a chat fine-tuning run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from diloco.data.chat_tokenizer import ChatTokenizer, Message
from diloco.data.corpus import Corpus
from diloco.data.heldout import is_heldout
from diloco.data.rows import Example, PackedRows, fitting
from diloco.data.settings import DataSettings
from diloco.data.text import checked_text, read_records
from diloco.errors import ConfigurationError, DataError

__all__ = ["ChatCorpus", "Question", "build_chat_corpus", "chat_tokenizer", "heldout_rows", "read_questions"]

_SHARE_GPT = {"human": "user", "gpt": "assistant"}  # the role names of ShareGPT


@dataclass(frozen=True)
class Question:
    """The messages of a conversation up to its last answer, and that answer."""

    messages: tuple[Message, ...]  # all messages before the answer
    answer: str  # the text of the answer
    more: Mapping[str, Any]  # further arguments of the chat template, such as ``tools``

    def prompt(self, tokenizer: ChatTokenizer) -> list[int]:
        """Return the tokens of the prompt for the answer."""
        if tokenizer.template is None and len(self.messages) == 1:
            return tokenizer.plain_prompt(str(self.messages[0]["content"]))
        return tokenizer.prompt(self.messages, **self.more)


@dataclass(frozen=True, eq=False)
class ChatCorpus(Corpus):
    """A corpus of conversations, packed into rows of one length."""

    notes: tuple[str, ...] = ()  # one phrase for each way in which conversations were changed or left out

    def description(self) -> str:
        rows = self.train
        assert isinstance(rows, PackedRows)
        counts = (
            f"{self.train_documents:,} conversations in {(len(rows) - 1) // rows.length:,} rows of {rows.length} "
            f"tokens, {rows.efficiency:.0%} full; {rows.counted_tokens:,} tokens count"
        )
        return "; ".join([counts, *self.notes, f"held out: {self.heldout_documents:,} conversations"])


def chat_tokenizer(settings: DataSettings) -> ChatTokenizer:
    """Return the tokenizer that ``settings`` name, with its chat template.

    Raises:
        ConfigurationError: ``data.tokenizer`` does not name the tokenizer of a model.
        DataError: as `ChatTokenizer`.
    """
    if settings.tokenizer in ("bytes", "bpe"):
        raise ConfigurationError(
            f"data.format='chat' needs the tokenizer of a model, not {settings.tokenizer!r}. Give a model folder as "
            "--model or data.tokenizer."
        )
    return ChatTokenizer(settings.tokenizer, settings.chat_template)


def build_chat_corpus(settings: DataSettings, sequence_length: int) -> ChatCorpus:
    """Read, split and tokenise the conversations that ``settings`` name, in rows of ``sequence_length`` tokens.

    Raises:
        DataError: the conversations cannot be read, or do not suffice for both splits.
        ConfigurationError: ``data.tokenizer`` does not name the tokenizer of a model.
    """
    tokenizer = chat_tokenizer(settings)
    records = [(place, record, json.dumps(record, sort_keys=True)) for place, record in read_records(settings.paths)]
    if settings.max_documents is not None:
        records = sorted(records, key=lambda each: xxhash.xxh3_64_intdigest(each[2].encode()))[: settings.max_documents]
    split: dict[bool, list[Example]] = {False: [], True: []}
    num_bytes = {False: 0, True: 0}
    counts = _Counts()
    for place, record, text in records:
        heldout = is_heldout(text, settings.heldout_fraction)
        if (example := _example(tokenizer, place, record, counts)) is not None:
            split[heldout].append(example)
            num_bytes[heldout] += tokenizer.num_bytes(example.tokens)
    packed, documents = {}, {}
    for heldout, examples in split.items():
        kept, cut, unfit = fitting(examples, sequence_length)
        counts.cut += cut
        counts.unanswered += unfit
        documents[heldout] = len(kept)
        if not kept:
            left_out = counts.unanswered + counts.special
            why = f" ({left_out} were left out because they have no answer or contain a special token)"
            raise DataError(
                f"Of {len(records)} conversations, data.heldout_fraction={settings.heldout_fraction:g} leaves none to "
                f"{'evaluate' if heldout else 'train'} on{why if left_out else ''}. Give more conversations, or change "
                "the fraction."
            )
        packed[heldout] = PackedRows(
            kept, sequence_length, padding=tokenizer.eos_id, together=settings.packing, dtype=tokenizer.dtype
        )
    fingerprint = f"{tokenizer.to_json()} {packed[False].digest} {packed[True].digest}"
    return ChatCorpus(
        train=packed[False],
        heldout=packed[True],
        tokenizer=tokenizer,
        train_documents=documents[False],
        heldout_documents=documents[True],
        train_bytes=num_bytes[False],
        heldout_bytes=num_bytes[True],
        fingerprint=xxhash.xxh3_128_hexdigest(fingerprint.encode()),
        notes=counts.notes(sequence_length),
    )


def heldout_rows(
    settings: DataSettings, tokenizer: ChatTokenizer, sequence_length: int, paths: Sequence[Path] = ()
) -> PackedRows:
    """Return the rows that `build_chat_corpus` holds out, or all conversations of ``paths``.

    Raises:
        DataError: the conversations can't be read, or there are none to evaluate on.
    """
    read = (
        example
        for place, record in read_records(paths or settings.paths)
        if (paths or is_heldout(json.dumps(record, sort_keys=True), settings.heldout_fraction))
        and (example := _example(tokenizer, place, record, _Counts())) is not None
    )
    kept, _, _ = fitting(read, sequence_length)
    return PackedRows(kept, sequence_length, padding=tokenizer.eos_id, together=settings.packing, dtype=tokenizer.dtype)


def read_questions(paths: Sequence[Path]) -> Iterator[Question]:
    """Yield the last answer of every conversation with the messages before it.

    Raises:
        DataError: the records can't be read, or a conversation does not end with an answer, as records of plain text.
    """
    for place, record in read_records(paths):
        messages = _messages(place, record)
        if messages is None or messages[-1]["role"] != "assistant":
            raise DataError(
                f"{place} has no answer to compare with. Give records with messages, of which the last is the "
                "assistant's, or with prompt and completion."
            )
        yield Question(tuple(messages[:-1]), str(messages[-1].get("content") or ""), _template_arguments(record))


@dataclass
class _Counts:
    """How many conversations were changed or left out while reading."""

    cut: int = 0
    unanswered: int = 0
    special: int = 0
    last_only: int = 0

    def notes(self, length: int) -> tuple[str, ...]:
        noted = (
            (self.cut, f"cut at {length} tokens"),
            (self.unanswered, "left out because they have no answer, or none before the cut"),
            (self.special, "left out because their text contains a special token of the tokenizer"),
            (self.last_only, "in which only the last answer counts, because the template changes earlier ones"),
        )
        return tuple(f"{count:,} {what}" for count, what in noted if count)


def _example(tokenizer: ChatTokenizer, place: str, record: Mapping[str, Any], counts: _Counts) -> Example | None:
    """Tokenise a record. If there is nothing to learn from it, return None and record why in ``counts``."""
    messages = _messages(place, record)
    if messages is None:
        text = checked_text(record["text"], place, "text")
        if tokenizer.holds_special(text):
            counts.special += 1
            return None
        return tokenizer.completion("", text)
    if any(tokenizer.holds_special(text) for text in _texts(messages)):
        counts.special += 1
        return None
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        counts.unanswered += 1
        return None
    if tokenizer.template is None and "messages" not in record:
        *before, answer = messages
        return tokenizer.completion("".join(_texts(before)), str(answer["content"]))
    try:
        example, all_count = tokenizer.conversation(messages, **_template_arguments(record))
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    counts.last_only += not all_count
    return example


def _template_arguments(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"tools": record["tools"]} if record.get("tools") else {}


def _messages(place: str, record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages of a record, or None for a record of plain text.

    Raises:
        DataError: the record has none of the known fields, or they are malformed.
    """
    if record.get("messages") is not None:
        return _checked_messages(place, "messages", record["messages"])
    if record.get("conversations") is not None:  # the format of ShareGPT
        turns = record["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise DataError(f"{place}: conversations must be a list of objects.")
        renamed = [
            {"role": _SHARE_GPT.get(turn.get("from"), turn.get("from")), "content": turn.get("value")} for turn in turns
        ]
        return _checked_messages(place, "conversations", renamed)
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            prompt, completion = [_message("user", prompt)], [_message("assistant", completion)]
        if isinstance(prompt, list) and isinstance(completion, list):
            return _checked_messages(place, "prompt and completion", [*prompt, *completion])
        raise DataError(f"{place}: prompt and completion must both be text, or both be lists of messages.")
    if "text" in record:
        return None
    raise DataError(
        f"{place} has the fields {', '.join(map(repr, sorted(record)))}. A conversation needs 'messages', 'prompt' "
        "and 'completion', or 'text'."
    )


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _checked_messages(place: str, name: str, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise DataError(
            f"{place}: {name} must be a list of messages whose role and content are text, got {repr(messages)[:80]}."
        )
    for message in messages:
        checked_text(message.get("content") or "", place, "content")
    return [dict(message) for message in messages]


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str) or bool(message.get("tool_calls"))


def _texts(messages: Iterable[Message]) -> list[str]:
    return [str(message.get("content") or "") for message in messages]
