"""Conversations: read in the form that chat templates take, tokenised, and packed into rows.

A record has ``messages``, or ``prompt`` and ``completion``, and perhaps ``tools`` and ``system``. Tables hold lists and
objects also as JSON, and a null for a field that is missing. A row is a training sequence, so no conversation is split.
Its targets say which tokens the loss counts and where conversations end.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.chat_tokenizer import ChatTokenizer, Example
from diloco.data.files import RowError, checked_text, read_rows, usable, warn_once
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
    try:
        messages, learned, tools, unused = _read(_without_nulls(record))
    except RowError as error:
        raise RowError(f"{place}: {error}") from error
    for name in sorted(unused):
        if not counts[f"unused {name}"]:  # each is named once
            warn_once(f"{place}: the field {name!r} is not used.")
        counts[f"unused {name}"] += 1
    if any(map(tokenizer.holds_special, texts_of([messages, tools]))):
        return "special"
    if not any(learned):
        return "unanswered"
    size = len(learned) - learned[::-1].index(True)  # what follows the last answer is left out
    try:
        example, all_count = tokenizer.conversation(messages[:size], learned[:size], tools)
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


_MARKS = re.compile("(^|_)(weights?|mask(s|ed)?|loss|train(ing|able)?)(_|$)")
"""Names of fields that may say what is learned. Only ``weight`` of a message can be followed."""


def _read(fields: dict[str, Any]) -> tuple[list[dict[str, Any]], list[bool], list[dict[str, Any]], set[str]]:
    """Return the messages, of each whether it is learned, the tools, and the names of the fields that are not used."""
    if marks := [name for name in sorted(fields) if _MARKS.search(name) and isinstance(fields[name], str | list)]:
        raise RowError(
            f"{marks[0]} marks parts of the record, which can't be followed: give messages a weight of 0 or 1."
        )
    if "messages" in fields:
        turns = _turns("messages", fields.pop("messages"))
    elif fields.keys() >= {"prompt", "completion"}:
        turns = [
            *_turns("prompt", fields.pop("prompt"), "user"),
            *_turns("completion", fields.pop("completion"), "assistant"),
        ]
    else:
        raise RowError(
            f"It has the fields {', '.join(map(repr, sorted(fields)))}. A conversation needs 'messages', or 'prompt' "
            "and 'completion'."
        )
    tools = [_tool(tool) for tool in _listed(fields.pop("tools", None))]
    messages = [_message(turn) for turn in turns]
    if content := checked_text(fields.pop("system", ""), "a record", "system"):
        messages.insert(0, ({"role": "system", "content": content}, False))
    return [message for message, _ in messages], [learned for _, learned in messages], tools, {*fields}


def _turns(name: str, value: Any, role: str = "") -> list[Any]:
    """Return the messages of a field; with a role, it may be the text of one instead."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        also = "text or " if role else ""
        raise RowError(f"{name} must be {also}a list of messages whose role and content are text, got {value!r:.80}.")
    return value


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str)


def _message(turn: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a message in the form that templates take, and whether it is learned."""
    rest = dict(turn)
    role, content = rest.pop("role"), rest.pop("content", None)
    calls = [_tool_call(call) for call in _listed(rest.pop("tool_calls", None))]
    message: dict[str, Any] = {"role": role}
    weight = rest.pop("weight", 1)
    for name, mark in {"weight": weight, **rest}.items():
        if _MARKS.search(name) and (name != "weight" or mark not in (0, 1)):
            raise RowError(
                f"{name} is {mark!r:.80}, which can't be followed: an answer is learned or not (weight = 1 or 0)."
            )
    if content is not None or not calls:
        message["content"] = _text(content)
    message |= rest | ({"tool_calls": calls} if calls else {})
    return message, role == "assistant" and bool(weight)


def _text(content: Any) -> str:
    """Return the content of a message, whose parts are joined."""
    if isinstance(content, list):
        parts = [{"text": part} if isinstance(part, str) else part for part in content]
        for part in parts:
            kind = part.get("type", "text") if isinstance(part, dict) else None
            if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                raise RowError(f"a message has the part {part!r:.80}, but only text can be learned from.")
        content = "".join(part["text"] for part in parts)
    return checked_text(content, "a message", "content")


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"a call of a tool needs a function with a name, got {call!r:.80}.")
    arguments = _from_json(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise RowError(f"the arguments of {function['name']} are not a JSON object, got {arguments!r:.80}.")
    return (call if "function" in call else {"type": "function"}) | {"function": {**function, "arguments": arguments}}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RowError(f"tools must be a list of objects, or the same as JSON, got {tool!r:.80}.")
    return tool


def texts_of(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, also the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
            yield from texts_of(each)


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls of its objects; those in lists stay."""
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):  # a map of a table
        value = dict(value)
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def _from_json(value: Any) -> Any:
    """Return what a text says in JSON; the value itself if it is no such text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _listed(value: Any) -> list[Any]:
    """Return the elements of a list, or a value alone, which tables often hold as JSON."""
    value = _from_json(value) or []
    return [_from_json(each) for each in (value if isinstance(value, list) else [value])]
