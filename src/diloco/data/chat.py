"""Conversations: read in the form that chat templates take, tokenised, and packed into rows.

A record has ``messages``, or ``prompt`` and ``completion``, and perhaps ``tools`` and ``system``. Tables hold lists and
objects also as JSON, and a null for a field that is missing. A row is a training sequence, so no conversation is split.
Its targets say which tokens the loss counts and where conversations end.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diloco.data.limits import limited
from diloco.data.settings import TEMPLATES, DataSettings, template_file
from diloco.data.source import Source, checked_text, warn_once
from diloco.data.split import Split, document_key, suffices, whole_split
from diloco.data.template import Marks, Message, Probe, Tools
from diloco.data.tokenizer import Tokenizer, bytes_of_tokens, library_tokenizer, stored_end, tokenizer_folder
from diloco.errors import ConfigurationError, DataError
from diloco.model import ENDS, NOT_COUNTED

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
_NOW = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")
_DATE = datetime(2024, 7, 26)  # instead of the current date, on which no example may depend

_SHORT: Sequence[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
"""A conversation that every template renders."""

MAX_RENDER_S, MAX_RENDER_BYTES = 60.0, 2 << 30
"""What the chat template may take for a conversation: time, which is usually a millisecond, and memory."""

_NOTES = {
    "cut": "cut at {length} tokens",
    "unanswered": "left out because they have no answer to learn, or none before the cut",
    "control": "left out because their text contains a special token of the tokenizer or of the template",
    "partial": "in which not every answer counts, because the template renders earlier ones differently",
}
"""How conversations are changed or left out."""


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation as tokens."""

    tokens: NDArray[Any]  # ``(n,)`` integers
    # ``(n,)`` bool: whether the loss counts a token; False for the first, which is not predicted
    counted: NDArray[np.bool_]
    # ``(n,)`` integers: UTF-8 bytes of the conversation that a token stands for. None: not known
    byte_counts: NDArray[Any] | None = None

    def cut(self, length: int) -> Example:
        """Return the first tokens, at most ``length``."""
        byte_counts = None if self.byte_counts is None else self.byte_counts[:length]
        return Example(self.tokens[:length], self.counted[:length], byte_counts)

    def counted_bytes(self) -> int:
        """Return how many bytes the tokens that the loss counts stand for; 0 if that isn't known."""
        return 0 if self.byte_counts is None else int(self.byte_counts[self.counted].sum())


def chat_rows(
    settings: DataSettings, tokenizer: ChatTokenizer, length: int
) -> tuple[PackedRows, PackedRows, Sequence[str]]:
    """Read, split and tokenise conversations: rows to train on, held-out ones, and what was cut or left out.

    No conversation is divided, and nothing is held out of a single one. The split is that of `whole_split`.
    """
    counts: Counter[str] = Counter()
    keys: list[float] = []
    kept: list[tuple[float, Example]] = []
    for key, where, record in _records(settings):
        keys.append(key)
        if (example := _example_at(where, tokenizer, record, length, counts)) is not None:
            kept.append((key, example))
    changes = ((counts[name], note) for name, note in _NOTES.items())
    notes = [f"{count:,} {note.format(length=length)}" for count, note in changes if count]
    if not kept:
        raise _nothing_left(len(keys), notes)
    kept_keys, fraction = [key for key, _ in kept], settings.heldout_fraction
    if _hash_suffices(keys, [key < fraction for key in kept_keys], fraction):
        split = Split(fraction)
    else:
        split = whole_split(kept_keys, fraction)
    train, heldout = (
        _rows([example for key, example in kept if (key < split.limit) == is_heldout], settings, tokenizer, length)
        for is_heldout in (False, True)
    )
    return train, heldout, notes


def heldout_rows(
    settings: DataSettings, tokenizer: ChatTokenizer, length: int, *, everything: bool = False
) -> PackedRows:
    """Return the held-out rows of `chat_rows`, or rows of all conversations; others are not tokenised if possible."""
    fraction = 1.0 if everything else settings.heldout_fraction
    keys: list[float] = []
    heldout: list[Example] = []
    kept: list[bool] = []  # of each conversation that was tokenised: whether the hash holds it out
    counts: Counter[str] = Counter()
    for key, where, record in _records(settings):
        keys.append(key)
        is_heldout = key < fraction
        if not is_heldout and False in kept:
            continue  # one of the others is enough, to show that something is left to train on
        if (example := _example_at(where, tokenizer, record, length, counts)) is not None:
            kept.append(is_heldout)
            heldout += [example] if is_heldout else []
    if everything and not heldout:
        raise _nothing_left(len(keys), [])
    if everything or _hash_suffices(keys, kept, fraction):
        return _rows(heldout, settings, tokenizer, length)
    return chat_rows(settings, tokenizer, length)[1]


def _hash_suffices(keys: Sequence[float], kept: Sequence[bool], fraction: float) -> bool:
    """Return whether the hash divides conversations well, and something is kept on both sides.

    ``kept`` has, of conversations that can be learned, whether the hash holds them out.
    """
    return suffices(keys, np.ones(len(keys)), fraction) and {*kept} == {True, False}


def _nothing_left(count: int, notes: Sequence[str]) -> DataError:
    left_out = f" ({'; '.join(notes)})" if notes else ""
    return DataError(
        f"Of {count} conversations none can be used{left_out}. Give others, or longer sequences. An "
        "answer is a message whose role is 'assistant'."
    )


def _rows(examples: Sequence[Example], settings: DataSettings, tokenizer: Tokenizer, length: int) -> PackedRows:
    return PackedRows(examples, length, padding=tokenizer.eos_id, together=settings.packing != "single")


def _records(settings: DataSettings) -> Iterator[tuple[float, str, Any]]:
    """Yield the key, place and content of each record."""
    for where, record in Source(settings).rows():
        try:
            yield document_key(json.dumps(record, sort_keys=True, default=str)), where, record
        except RecursionError as error:
            raise DataError(f"{where}: it is nested too deeply.") from error


def _example_at(where: str, tokenizer: ChatTokenizer, record: Any, length: int, counts: Counter[str]) -> Example | None:
    try:
        return _example(tokenizer, record, length, counts)
    except (DataError, RecursionError) as error:
        why = error if isinstance(error, DataError) else "it is nested too deeply."
        raise DataError(f"{where}: {why}") from error


def _example(tokenizer: ChatTokenizer, record: Any, length: int, counts: Counter[str]) -> Example | None:
    """Tokenise a record, at most ``length`` tokens; return None if there is nothing to learn from it.

    Count by `_NOTES` what is left out or changed.
    """
    fields = _without_nulls(record)
    if _is_null(record, fields):
        counts["unanswered"] += 1
        return None
    needs_template = tokenizer.has_template or not _is_completion(fields)
    messages, learned, tools, unused = _read(fields)
    for name in sorted(unused):
        warn_once(f"The field {name!r} of conversations is not used.")
    if needs_template and tokenizer.control_token(messages, tools) is not None:
        counts["control"] += 1
        return None
    if any(learned):
        size = len(learned) - learned[::-1].index(True)  # what follows the last answer is left out
        if needs_template:
            whole, all_count = tokenizer.conversation(messages[:size], learned[:size], tools)
        else:
            prompt, answer = (str(message["content"]) for message in messages)
            whole, all_count = tokenizer.completion(prompt, answer), True
        counts["partial"] += not all_count
        example = whole.cut(length)
        if example.counted.any():
            counts["cut"] += len(example.tokens) < len(whole.tokens)
            return example
    counts["unanswered"] += 1
    return None


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
                targets = np.where(example.counted, self.inputs[row, begin:end], NOT_COUNTED)
                self.targets[row, begin : end - 1] = targets[1:]
                self.targets[row, end - 1] = ENDS
                begin = end
        self._row_bytes = [sum(examples[number].counted_bytes() for number in numbers) for numbers in rows]
        self.documents, self.marks_ends = len(examples), together
        self.num_tokens = sum(sizes)  # without padding
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

    def target_bytes(self, windows: NDArray[np.int64], length: int) -> int:
        """Return how many bytes of the conversations the counted targets of rows stand for."""
        return sum(self._row_bytes[row] for row in windows.tolist())


def pack_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return which items of these sizes go into each row of ``length``: best fit, largest first.

    >>> pack_rows([3, 2, 6, 4, 1], length=6)
    [[2], [3, 1], [0, 4]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free space, row number), ascending
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        index = bisect_left(room, (sizes[number], -1))
        if index == len(room):
            rows.append([])
            free, row = length, len(rows) - 1
        else:
            free, row = room.pop(index)
        rows[row].append(number)
        if free > sizes[number]:
            insort(room, (free - sizes[number], row))
    return rows


_OF_TEMPLATE = {
    *(("role", role) for role in ("system", "developer", "user", "assistant", "tool", "function")),
    ("type", "function"),
}
"""Values by which templates choose what they write."""

_MARKS = re.compile("(^|_)(weights?|mask(s|ed)?|loss|train(ing|able)?)(_|$)")
"""Names of fields that may say what is learned. Only ``weight`` or ``loss_weight`` of a message can be followed."""


def _read(fields: Any) -> tuple[list[dict[str, Any]], list[bool], list[dict[str, Any]], set[str]]:
    """Return the messages, of each whether it is learned, the tools, and the names of the fields that are not used."""
    if not isinstance(fields, dict):
        raise DataError("This is text. Conversations are read from .jsonl, .json and .parquet files.")
    if marks := [name for name in sorted(fields) if _MARKS.search(name) and isinstance(fields[name], str | list)]:
        raise DataError(
            f"{marks[0]} marks parts of the record, which can't be followed: give messages a weight of 0 or 1."
        )
    if "messages" in fields:
        turns = _turns("messages", _from_json(fields.pop("messages")))
    elif fields.keys() >= {"prompt", "completion"}:
        turns = [
            *_turns("prompt", fields.pop("prompt"), "user"),
            *_turns("completion", fields.pop("completion"), "assistant"),
        ]
    else:
        raise DataError(
            f"It has the fields {', '.join(map(repr, sorted(fields)))}. A conversation needs 'messages', or 'prompt' "
            "and 'completion'."
        )
    if content := checked_text(fields.pop("system", ""), "a record", "system"):
        turns.insert(0, {"role": "system", "content": content})
    tools = _listed(fields.pop("tools", None))
    if odd := [tool for tool in tools if not isinstance(tool, dict)]:
        raise DataError(f"tools must be a list of objects, or the same as JSON, got {odd[0]!r:.80}.")
    messages = [_message(turn) for turn in turns]
    return [message for message, _ in messages], [learned for _, learned in messages], tools, {*fields}


def _is_null(record: Any, fields: Any) -> bool:
    """Return whether a record has the columns of a conversation, with null in place of what is said.

    ``fields`` is the record without its nulls.
    """
    if not isinstance(fields, dict) or "messages" in fields or fields.keys() >= {"prompt", "completion"}:
        return False
    return "messages" in record or record.keys() >= {"prompt", "completion"}


def _is_completion(fields: Any) -> bool:
    """Return whether a record is a prompt and its completion, both of them plain text, which need no template."""
    if not isinstance(fields, dict) or fields.keys() & {"messages", "system", "tools"}:
        return False
    return isinstance(fields.get("prompt"), str) and isinstance(fields.get("completion"), str)


def _turns(name: str, value: Any, role: str = "") -> list[Any]:
    """Return the messages of a field; with a role, it may be the text of one instead."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = value if isinstance(value, list) else []
    if not turns or not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns):
        also = "text or " if role else ""
        raise DataError(f"{name} must be {also}a list of messages whose role and content are text, got {value!r:.80}.")
    return turns


def _message(turn: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a message in the form that templates take, and whether it is learned."""
    rest = dict(turn)
    role, content = rest.pop("role"), rest.pop("content", None)
    older = _listed(rest.pop("function_call", None))
    calls = [_tool_call(call) for call in (*older, *_listed(rest.pop("tool_calls", None)))]
    weights: dict[str, Any] = {name: rest.pop(name) for name in ("weight", "loss_weight") if name in rest}
    for name, mark in {**weights, **rest}.items():
        if _MARKS.search(name) and (name not in weights or mark not in (0, 1)):
            raise DataError(
                f"{name} is {mark!r:.80}, which can't be followed: an answer is learned or not (weight = 1 or 0)."
            )
    message: dict[str, Any] = {"role": role}
    if content is not None or not calls:
        message["content"] = _text(content)
    message |= rest | ({"tool_calls": calls} if calls else {})
    return message, role == "assistant" and all(weights.values())


def _text(content: Any) -> str:
    """Return the content of a message, whose parts are joined."""
    if isinstance(content, list):
        parts = [{"text": part} if isinstance(part, str) else part for part in content]
        for part in parts:
            kind = part.get("type", "text") if isinstance(part, dict) else None
            if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                raise DataError(f"a message has the part {part!r:.80}, but only text can be learned from.")
        content = "".join(part["text"] for part in parts)
    return checked_text(content, "a message", "content")


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"a call of a tool needs a function with a name, got {call!r:.80}.")
    arguments = _from_json(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments of {function['name']} are not a JSON object, got {arguments!r:.80}.")
    return (call if "function" in call else {"type": "function"}) | {"function": {**function, "arguments": arguments}}


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, also the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            yield from _texts(item)


def _apart(value: Any, marks: Collection[str], name: str = "") -> Any:
    """Return a JSON value in whose strings question marks replace what may be a part of one of ``marks``."""
    if isinstance(value, dict):
        return {key: _apart(item, marks, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_apart(item, marks) for item in value]
    if not isinstance(value, str) or (name, value) in _OF_TEMPLATE:
        return value
    if any(value.strip() in mark for mark in marks):
        return "?" * len(value)
    parts = [(mark[:size], mark[size:]) for mark in marks for size in range(1, len(mark))]
    end = max((len(first) for first, _ in parts if value.endswith(first)), default=0)
    begin = max((len(last) for _, last in parts if value.startswith(last)), default=0)
    return "?" * begin + value[begin : len(value) - end] + "?" * end


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls of its objects; those in lists stay."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _from_json(value: Any) -> Any:
    """Return what a text says in JSON; the value itself if it isn't JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _listed(value: Any) -> list[Any]:
    """Return the elements of a list, or a value alone, which tables often hold as JSON."""
    value = _from_json(value) or []
    return [_from_json(item) for item in (value if isinstance(value, list) else [value])]


class ChatTokenizer(Tokenizer):
    """The tokenizer of a ``transformers`` folder, with its chat template and the tokens that separate messages.

    It renders and tokenises conversations and finds the answers in them.

    Args:
        place: the folder, or ``hf:NAME``.
        format: a Jinja file, or the name of a template of `TEMPLATES`, to use instead of the folder's own template.
    """

    def __init__(self, place: str, format: str = "chat") -> None:
        library = library_tokenizer(place, "finetune", "A conversation needs transformers")
        eos = library.eos_token or stored_end(tokenizer_folder(place))
        super().__init__(library.backend_tokenizer.to_str(), eos=eos, source=place)
        library.eos_token = self._eos
        self._library = library
        if (template := template_file(format)) is not None:
            library.chat_template = _read_template(template, format)
            spelled = re.findall(r"<\|\w+\|>", library.chat_template) if format in TEMPLATES else []
            if missing := {*spelled} - library.get_vocab().keys():
                raise ConfigurationError(
                    f"{place} has no token {min(missing)}, which data.format={format} needs: a text could spell it. "
                    "Use --data.format plain, which needs no tokens of its own."
                )
        library.chat_template = self._with_beginning(library.chat_template)
        self.has_template = bool(library.chat_template)
        self._added = {*library.added_tokens_decoder}
        special = {*library.all_special_tokens, *(str(t) for t in library.added_tokens_decoder.values() if t.special)}
        self.answer_ends: frozenset[int] = frozenset()  # any of these tokens ends an answer
        marks = Probe(self._render, self._added_in, self._learned_in).marks() if self.has_template else Marks()
        self.answer_ends = marks.ends or frozenset({self.eos_id})
        self.closing = marks.closing  # text between an answer and the token that ends it
        self._separators = marks.control | self.answer_ends  # tokens that begin or end messages
        # no text may hold these; what is unknown to the vocabulary may be in any
        self._control = self._separators | {*library.convert_tokens_to_ids(sorted(special))} - {library.unk_token_id}
        if not marks.end_is_learned:
            warn_once(
                f"The chat template of {place} does not mark the token that ends an answer as part of it, so models do "
                "not learn to end answers. Move the token in front of {% endgeneration %}."
            )

    @property
    def facts(self) -> dict[str, str]:
        template = self._library.chat_template
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return super().facts | ({"chat template": xxhash.xxh3_64_hexdigest(text.encode())} if self.has_template else {})

    def _with_beginning(self, template: Any) -> Any:
        """Return a template, or several by name, that begins with the tokens with which the tokenizer begins a text."""
        if isinstance(template, dict):
            return {name: self._with_beginning(text) for name, text in template.items()}
        opening = "".join(self._library.convert_ids_to_tokens(self.begin_prompt))
        if not template or not opening:
            return template
        try:
            text = str(self._rendered(template, _SHORT, tokenize=False))
        except ConfigurationError:
            raise
        except Exception:  # it may need more than this conversation has
            return template
        literal = json.dumps(opening, ensure_ascii=False)
        return template if text.startswith(opening) else f"{{{{ {literal} }}}}{template}"

    def save(self, folder: Path) -> None:
        """Write the files of `Tokenizer.save`, the template, and everything else that the library saves."""
        folder.mkdir(parents=True, exist_ok=True)
        # several templates go into ``tokenizer_config.json``, since only files are exported and mirrored
        self._library.save_pretrained(folder, save_jinja_files=isinstance(self._library.chat_template, str))

    def control_token(self, messages: Sequence[Message], tools: Tools = ()) -> str | None:
        """Return a token that begins or ends messages and that the texts of a conversation write; None without one.

        A text may also write only a part of it, and the template the rest.
        """
        text = checked_text("\n".join(_texts([messages, tools])), self._source, "conversation")
        encoded = self._library.backend_tokenizer.encode(text, add_special_tokens=False)
        written = [index for index in encoded.ids if index in self._control]
        separators = self._library.convert_ids_to_tokens(sorted(self._separators))
        apart = [_apart(message, separators) for message in messages]
        if not written and apart != [*messages]:
            together, alone = (self._separators_in(each, tools) for each in (messages, apart))
            written = [*(Counter(together) - Counter(alone)), *(Counter(alone) - Counter(together))]
        return str(self._library.convert_ids_to_tokens(written[0])) if written else None

    def _separators_in(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        tokens = self._tokens(self._render(messages, tools))[0].tolist()
        return [index for index in tokens if index in self._separators]

    def _added_in(self, text: str) -> list[tuple[int, int]]:
        tokens, spans = self._tokens(text)
        found = zip(tokens.tolist(), spans.tolist(), strict=True)
        # some vocabularies have runs of white space among them
        return [(index, begin) for index, (begin, end) in found if index in self._added and text[begin:end].strip()]

    def _learned_in(self, messages: Sequence[Message], tools: Tools) -> Collection[int]:
        example, _ = self.conversation(messages, tools=tools)
        return [int(index) for index in example.tokens[example.counted]]

    def completion(self, prompt: str, completion: str) -> Example:
        """Tokenise a prompt and what follows it as a document, of which only the latter counts, with its end.

        Its first tokens are those of `encode_prompt`, if the prompt isn't empty.
        """
        before, bytes_before = self._text_alone(prompt)
        tokens, byte_counts = self._text_alone(prompt + completion)
        if tokens[: len(before)].tolist() != before.tolist():  # a token crosses the border
            after, bytes_after = (array[len(self.encode("")) :] for array in self._text_alone(completion))
            tokens, byte_counts = np.append(before, after), np.append(bytes_before, bytes_after)
        begin, end = self.begin_prompt, self.end_document
        tokens = np.concatenate([begin, tokens, end]).astype(self.dtype)
        byte_counts = np.pad(byte_counts, (len(begin), len(end)))
        return Example(tokens, np.arange(len(tokens)) >= max(1, len(begin) + len(before)), byte_counts)

    def _text_alone(self, text: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the tokens of a text, and how many of its bytes each stands for, without what begins and ends it."""
        tokens, byte_counts = self.encode_counted([text])
        inside = slice(len(self.begin_document), len(tokens) - len(self.end_document))
        return tokens[inside], byte_counts[inside]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the prompt for the answer to ``messages``, as `conversation` tokenises them."""
        text = self._render(messages, (), answer_next=True)
        return [int(token) for token in self._tokens(text)[0]]

    def conversation(
        self, messages: Sequence[Message], learned: Sequence[bool] | None = None, tools: Tools = ()
    ) -> tuple[Example, bool]:
        """Tokenise a conversation. Its answers count, each with the tokens that end it.

        The template decides which tokens are answers: an answer runs from the end of the prompt for it to the end of
        the conversation up to it. One that opens the conversation has no prompt, and doesn't count. If the template
        marks answers itself (``{% generation %}``), only what it marks counts. If the end of the prompt (``<think>``)
        is missing before an answer, the answer runs from where it differs from the prompt. ``learned`` says for each
        message whether it counts, if it is an answer.

        An end-of-document token is added behind the last answer if the template writes no token there that ends it.

        Returns:
            The example, and whether all answers to learn count. Some templates render earlier answers differently once
            another message follows (without their reasoning), or refuse what precedes them; these don't count.

        Raises:
            DataError: the template refuses the conversation, or does not render the last answer after its prompt.
        """
        whole = self._render(messages, tools)
        tokens, spans = self._tokens(whole)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = [number for number in answers if learned is None or learned[number]]
        marked = np.ones(len(tokens), dtype=np.bool_)
        counted, all_count = np.zeros_like(marked), True
        if _MARKS_ANSWERS.search(self._template_for(tools)):
            masks = self._applied(messages, tools, return_assistant_tokens_mask=True, return_dict=True)
            marked = np.array(masks["assistant_masks"], dtype=np.bool_)
            if chosen == answers:
                chosen, counted = [], marked.copy()
        for number in chosen:
            if number == 0:
                continue  # nothing comes before it that a model could be asked with
            span = self._span(messages, number, whole, tools)
            if span is not None:
                counted |= (spans[:, 1] > span[0]) & (spans[:, 0] < span[1])
            elif number == answers[-1]:
                raise DataError(
                    f"The chat template of {self._source} does not render an answer after the prompt for it, so the "
                    f"tokens to learn can't be found. The conversation begins with {whole[:60]!r}. Give a template "
                    "with {% generation %} (--data.format FILE.jinja)."
                )
            else:
                all_count = False
        counted &= marked
        counted[:1] = False
        byte_counts = bytes_of_tokens(whole, spans)
        byte_counts[np.isin(tokens, list(self._control_ids))] = 0
        if messages[-1]["role"] == "assistant" and not self._is_ended(tokens, counted):
            tokens, counted = np.append(tokens, tokens.dtype.type(self.eos_id)), np.append(counted, True)
            byte_counts = np.append(byte_counts, 0)
        return Example(tokens, counted, byte_counts), all_count

    def _is_ended(self, tokens: NDArray[Any], counted: NDArray[np.bool_]) -> bool:
        """Return whether a token ends the last answer that counts, if there is one. Some templates end it by text."""
        if not counted.any() or not self.answer_ends:
            return True
        before = np.flatnonzero(~counted[: np.flatnonzero(counted)[-1]])[-1]  # the first token never counts
        return not {*self.answer_ends, self.eos_id}.isdisjoint(tokens[before:].tolist())

    def _span(self, messages: Sequence[Message], number: int, whole: str, tools: Tools) -> tuple[int, int] | None:
        """Return where an answer begins and ends in the text of its conversation; None if that isn't clear."""
        is_last = number == len(messages) - 1
        try:
            after = whole if is_last else self._render(messages[: number + 1], tools)
            prompt = self._render(messages[:number], tools, answer_next=True)
            if not whole.startswith(after):
                return None
            if after.startswith(prompt):
                return len(prompt), len(after)
            begin = len(os.path.commonprefix([after, prompt]))  # noqa: RUF071  # of characters, not of paths
            return (begin, len(after)) if begin > len(self._render(messages[:number], tools)) else None
        except DataError:
            if is_last:
                raise
            return None

    def _tokens(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ``(n,)`` tokens of a text, special ones included, and their character ranges, ``(n, 2)``."""
        encoded = self._library(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(encoded["input_ids"], dtype=self.dtype), spans

    def _template_for(self, tools: Tools) -> str:
        """Return the template, of several the one that the library takes; it shows one date, whatever the day is."""
        if not self._library.chat_template:
            raise DataError(
                f"{self._source} has no chat template, which messages need. Choose one: --data.format plain works with "
                f"every tokenizer, {' and '.join(sorted({*TEMPLATES} - {'plain'}))} with those that have its tokens, "
                "FILE.jinja is one of your own."
            )
        template = self._library.get_chat_template(tools=tools or None)
        return _NOW.sub(_dated, template)

    def _render(self, messages: Sequence[Message], tools: Tools, *, answer_next: bool = False) -> str:
        text = str(self._applied(messages, tools, tokenize=False, add_generation_prompt=answer_next))
        return checked_text(text, self._source, "conversation")  # a role may hold what isn't text

    def _applied(self, messages: Sequence[Message], tools: Tools, **how: Any) -> Any:
        template = self._template_for(tools)
        try:
            return self._rendered(template, messages, tools=tools or None, **how)
        except ConfigurationError:
            raise
        except Exception as error:  # Jinja's errors, and whatever a template raises
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"The chat template of {self._source} refused a conversation with the roles {roles:.300}: "
                f"{str(error).rstrip('.'):.300}."
            ) from error

    def _rendered(self, template: str, messages: Sequence[Message], **how: Any) -> Any:
        with limited(f"The chat template of {self._source} (or of --data.format)", MAX_RENDER_S, MAX_RENDER_BYTES):
            return self._library.apply_chat_template(messages, chat_template=template, **how)


def _dated(now: re.Match[str]) -> str:
    """Return the one date in the form that a template asks for; what is no form stays, and the template is refused."""
    try:
        return repr(_DATE.strftime(now[2]))
    except ValueError:
        return now[0]


def _read_template(file: Path, format: str) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"data.format={format} can't be read: {error}.") from error
