"""One form for the ways in which records write conversations.

`read_conversation` turns a record into the messages that a chat template takes, and says which answers are learned and
which fields were not used. Read are ``messages`` (OpenAI), ``conversations`` (ShareGPT), a question with its answer
(``prompt`` and ``completion`` or ``chosen``, ``instruction``, ``input`` and ``output``, and a few more) and ``text``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.data.text import RowError, checked_text

__all__ = ["Conversation", "read_conversation", "texts_of"]

_PAIRS = (
    ("prompt", "", "completion"),
    ("prompt", "", "chosen"),  # preferences: the chosen answer is learned
    ("prompt", "", "response"),
    ("instruction", "input", "output"),  # Alpaca
    ("instruction", "context", "response"),  # Dolly
    ("question", "", "answer"),
    ("question", "", "response"),
)
"""Fields of a question, more of it, and its answer."""

_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "tool_response", "function_response"), "tool"),
    "system": "system",
}
"""What ShareGPT and others call the roles; other names are passed on to the template."""

_MARKS = dict.fromkeys(("weight", "loss_weight", "loss_scale", "loss", "train", "training", "trainable"), True)
_MARKS |= {"masked": False}
_UNREADABLE = ("mask", "loss_mask", "train_detail", "completion_mask", "assistant_mask", "assistant_masks")
"""Fields of a message that say whether it is learned, with the value if it is; and those that can't be followed."""


@dataclass(frozen=True)
class Conversation:
    """A record in the form that chat templates take."""

    messages: tuple[dict[str, Any], ...] = ()  # arguments of calls are objects, or the same as JSON
    learned: tuple[bool, ...] = ()  # of each message; only the assistant's are learned
    tools: tuple[dict[str, Any], ...] = ()
    text: str | None = None  # the text of a record without messages
    needs_template: bool = False  # False: without a template, the texts of its question and answer are joined
    unused: frozenset[str] = frozenset()  # names of fields


def read_conversation(place: str, record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record at a place; raise `RowError` if its fields are unknown or malformed.

    A null stands for a field that is missing, because tables write one for the fields of other rows.
    """
    try:
        return _read(_without_nulls(record))
    except RowError as error:
        raise RowError(f"{place}: {error}") from error


def _read(fields: dict[str, Any]) -> Conversation:
    names = sorted(fields)
    turns = next((name for name in ("messages", "conversations") if name in fields), "")
    pair = next((names for names in _PAIRS if names[0] in fields and names[2] in fields), None)
    if not turns and pair is None and isinstance(fields.get("chosen"), list):
        turns = "chosen"
    if not turns and pair is None:
        if "text" not in fields:
            raise RowError(
                f"It has the fields {', '.join(map(repr, names))}. A conversation needs 'messages', 'prompt' and "
                "'completion', or 'text'."
            )
        text = checked_text(fields.pop("text"), "a document", "text")
        return Conversation(text=text, unused=frozenset(fields))
    for name in (*_MARKS, *_UNREADABLE):
        if isinstance(fields.get(name), str | list):
            raise RowError(
                f"{name} marks parts of the record, which can't be followed: give messages a weight of 0 or 1."
            )
    tools = tuple(_tool(tool) for tool in _listed(fields.pop("tools", None)))
    said = _turns(turns, fields.pop(turns)) if turns else _question_and_answer(fields, *pair or _PAIRS[0])
    messages = [_message(turn) for turn in said]
    roles = [message["role"] for message, _ in messages if message["role"] != "system"]
    for name in ("system_prompt", "system"):
        if name in fields:
            content = checked_text(fields.pop(name), "a record", name)
            if content and (messages[0][0]["role"], messages[0][0].get("content")) != ("system", content):
                messages.insert(0, ({"role": "system", "content": content}, False))
    return Conversation(
        messages=tuple(message for message, _ in messages),
        learned=tuple(learned for _, learned in messages),
        tools=tools,
        needs_template=turns == "messages" or roles != ["user", "assistant"],
        unused=frozenset(fields),
    )


def _question_and_answer(fields: dict[str, Any], question: str, more: str, answer: str) -> list[Any]:
    """Return the messages in the fields of a question, of more of it, and of its answer, each a text or messages."""
    asked, rest, answered = (fields.pop(name, None) for name in (question, more, answer))
    if rest:
        if not isinstance(asked, str) or not isinstance(rest, str):
            raise RowError(f"{question} and {more} must both be text.")
        asked = f"{asked}\n\n{rest}"
    answers = _turns(answer, answered, "assistant")
    whole = _ROLES.get(_role(answers[0]).lower()) != "assistant"  # the answer's field repeats the question
    return answers if whole else [*_turns(question, asked, "user"), *answers]


def _turns(name: str, value: Any, role: str = "") -> list[Any]:
    """Return the messages of a field, which may be written as JSON; with a role, it may be the text of one instead."""
    turns = _from_json(value)
    if not isinstance(turns, list) or not turns or not all(map(_role, turns)):
        if not role or not isinstance(value, str):
            also = "text or " if role else ""
            raise RowError(
                f"{name} must be {also}a list of messages whose role and content are text, got {turns!r:.80}."
            )
        turns = [{"role": role, "content": value}]
    return turns


def _role(turn: Any) -> str:
    role = (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None
    return role if isinstance(role, str) else ""


def _message(turn: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a message in the form that templates take, and whether it is learned."""
    rest = _without_nulls(turn)
    role = rest.pop("role" if "role" in rest else "from")
    content = rest.pop("content" if "content" in rest else "value", None)
    if role == "function_call":  # of ShareGPT: the content is the call
        rest["tool_calls"], content = _from_json(content), ""
    calls = [_tool_call(call) for call in _listed(rest.pop("tool_calls", None))]
    message: dict[str, Any] = {"role": _ROLES.get(role.lower(), role)}
    learned = message["role"] == "assistant"
    for name in (*_MARKS, *_UNREADABLE):
        if name in rest:
            mark = rest.pop(name)
            if name in _UNREADABLE or not isinstance(mark, bool | int | float) or mark not in (0, 1):
                raise RowError(
                    f"{name} is {mark!r:.80}, which can't be followed: an answer is learned or not (weight = 1 or 0)."
                )
            learned &= bool(mark) == _MARKS[name]
    if content is not None or not calls:
        message["content"] = _text(content)
    return message | rest | ({"tool_calls": calls} if calls else {}), learned


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
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else arguments
    if not isinstance(_from_json(arguments), dict):
        raise RowError(f"the arguments of {function['name']} are not a JSON object, got {arguments!r:.80}.")
    return (call if "function" in call else {"type": "function"}) | {"function": {**function, "arguments": arguments}}


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as an object, whose schema may be written as JSON."""
    if not isinstance(tool, dict):
        raise RowError(f"tools must be a list of objects, or the same as JSON, got {tool!r:.80}.")
    function = tool.get("function", tool)
    if isinstance(function, dict) and "parameters" in function:
        function = {**function, "parameters": _from_json(function["parameters"])}
    return {**tool, "function": function} if "function" in tool else function


def texts_of(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, also the names of fields, and those in a text that is itself JSON."""
    if isinstance(value, str):
        yield value
        if value[:1] in ("{", "[") and (parsed := _from_json(value)) is not value:
            yield from texts_of(parsed)
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
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _listed(value: Any) -> list[Any]:
    """Return the elements of a list, or a value alone; both, and each element, may be written as JSON."""
    value = _from_json(value) or []
    return [_from_json(each) for each in (value if isinstance(value, list) else [value])]
