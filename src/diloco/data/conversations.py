"""Conversations in the form that chat templates take, and which of their answers are learned.

A record has ``messages``, or ``prompt`` and ``completion``, and perhaps ``tools`` and ``system``. Tables hold lists and
objects also as JSON, and a null for a field that is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.data.files import RowError, checked_text

__all__ = ["Conversation", "read_conversation", "texts_of"]

_MARKS = re.compile("(^|_)(weights?|mask(s|ed)?|loss|train(ing|able)?)(_|$)")
"""Names of fields that may say what is learned. Only ``weight`` of a message can be followed."""


@dataclass(frozen=True)
class Conversation:
    """A record in the form that chat templates take."""

    messages: tuple[dict[str, Any], ...]  # arguments of calls are objects
    learned: tuple[bool, ...]  # of each message; only the assistant's are learned
    tools: tuple[dict[str, Any], ...]
    unused: frozenset[str]  # names of fields


def read_conversation(place: str, record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record at a place; raise `RowError` if its fields are unknown or malformed."""
    try:
        return _read(_without_nulls(record))
    except RowError as error:
        raise RowError(f"{place}: {error}") from error


def _read(fields: dict[str, Any]) -> Conversation:
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
    tools = tuple(_tool(tool) for tool in _listed(fields.pop("tools", None)))
    messages = [_message(turn) for turn in turns]
    if content := checked_text(fields.pop("system", ""), "a record", "system"):
        messages.insert(0, ({"role": "system", "content": content}, False))
    read, learned = zip(*messages, strict=True)
    return Conversation(read, learned, tools, frozenset(fields))


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
