"""One form for every way in which records write conversations.

`read_conversation` turns a record into the messages that a chat template takes, and says which answers are learned and
which fields were not used. Read are ``messages`` (OpenAI), ``conversations`` (ShareGPT), a question with its answer
(``prompt`` and ``completion`` or ``chosen``, ``instruction``, ``input`` and ``output``, and a few more) and ``text``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.data.hub import ArrowRow
from diloco.data.text import RowError, checked_text

__all__ = ["Conversation", "read_conversation", "texts_of"]

_TURNS = ("messages", "conversations", "conversation")
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

_MARKS: dict[str, bool | None] = {
    **dict.fromkeys(("weight", "loss_weight", "loss_scale", "loss", "loss_mask"), True),
    **dict.fromkeys(("train", "training", "trainable"), True),
    **dict.fromkeys(("completion_mask", "assistant_mask", "assistant_masks"), True),
    "masked": False,
    **dict.fromkeys(("mask", "train_detail"), None),
}
"""Fields that say what is learned, and with which value it is; None: formats differ, or mark parts of an answer."""

_VALUES = ("default", "const", "example", "examples", "enum")  # keywords of JSON Schema whose values may be null


@dataclass(frozen=True)
class Conversation:
    """A record in the form that chat templates take."""

    messages: tuple[dict[str, Any], ...] = ()  # arguments of calls are objects, or the same as JSON
    learned: tuple[bool, ...] = ()  # of each message; only the assistant's are learned
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the template, such as ``tools``
    text: str | None = None  # the text of a record without messages
    needs_template: bool = False  # False: without a template, the texts of its question and answer are joined
    unused: frozenset[str] = frozenset()  # what is not used, as phrases


def read_conversation(place: str, record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record at a place; raise `RowError` if its fields are unknown or malformed."""
    whole = _without_nulls(record) if isinstance(record, ArrowRow) else record
    reading = _Reading(place, {name: value for name, value in whole.items() if value is not None})
    fields = reading.fields
    turns = next((name for name in _TURNS if name in fields), "")
    pair = next((names for names in _PAIRS if names[0] in fields and names[2] in fields), None)
    if not turns and pair is None and isinstance(fields.get("chosen"), list):
        turns = "chosen"
    if not turns and pair is None and "text" in record:
        text = checked_text(fields.pop("text", None), place, "text")
        return Conversation(text=text, unused=reading.unused())
    if not turns and pair is None:
        raise RowError(
            f"{place} has the fields {', '.join(map(repr, sorted(record)))}. A conversation needs 'messages', 'prompt' "
            "and 'completion', or 'text'."
        )
    arguments = reading.template_arguments()
    if turns:
        reading.add(turns, fields.pop(turns))
    elif pair is not None:
        reading.pair(*pair)
    reading.follow_marks()
    reading.add_system()
    roles = [message["role"] for message in reading.messages if message["role"] != "system"]
    return Conversation(
        messages=tuple(reading.messages),
        learned=tuple(reading.learned),
        arguments=arguments,
        needs_template=turns == "messages" or roles != ["user", "assistant"],
        unused=reading.unused(),
    )


class _Reading:
    """A record while it is read: a field is taken out of ``fields`` when it is used."""

    def __init__(self, place: str, fields: dict[str, Any]) -> None:
        self.place = place
        self.fields = fields
        self.messages: list[dict[str, Any]] = []
        self.learned: list[bool] = []
        self._schemas: dict[str, Any] = {}  # name of a tool -> the schema of its arguments
        self._ignored: set[str] = set()

    def unused(self) -> frozenset[str]:
        return frozenset({f"the field {name!r}" for name in self.fields} | self._ignored)

    def error(self, problem: str, value: Any = None) -> RowError:
        return RowError(f"{self.place}: {problem}{'' if value is None else f', got {value!r:.80}'}.")

    def pair(self, question: str, more: str, answer: str) -> None:
        """Read the fields of a question, of more of it, and of its answer, each a text or messages."""
        asked, rest, answered = (self.fields.pop(name, None) for name in (question, more, answer))
        if rest:
            if not isinstance(asked, str) or not isinstance(rest, str):
                raise self.error(f"{question} and {more} must both be text")
            asked = f"{asked}\n\n{rest}"
        before = self.fields.pop("history", [])  # earlier questions and answers, in Alpaca's format
        if not isinstance(before, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in before):
            raise self.error("history must be a list of pairs of a question and its answer")
        for text, role in ((text, role) for turn in before for text, role in zip(turn, _SPEAKERS, strict=True)):
            if text is not None:
                self.add("history", text, role)
        begin = len(self.messages)
        self.add(question, asked, "user")
        end = len(self.messages)
        self.add(answer, answered, "assistant")
        said = [(message["role"], str(message.get("content")).strip()) for message in self.messages]
        if said[end][0] != "assistant" and said[end - 1] in said[end:]:  # the answer's field repeats the question
            del self.messages[begin:end], self.learned[begin:end]

    def add(self, name: str, value: Any, role: str = "") -> None:
        """Append the messages of a field; with a role, it may be the text of one message instead."""
        turns = _from_json(value)
        if role and isinstance(value, str) and not (isinstance(turns, list) and turns and all(map(_has_role, turns))):
            turns = [{"role": role, "content": value}]
        if not isinstance(turns, list) or not turns or not all(map(_has_role, turns)):
            raise self._no_messages(name, turns, "text or " if role else "")
        for turn in turns:
            message, learned = self._turn(name, turn)
            self.messages.append(message)
            self.learned.append(learned)

    def _no_messages(self, name: str, value: Any, also: str = "") -> RowError:
        return self.error(f"{name} must be {also}a list of messages whose role and content are text", value)

    def _turn(self, name: str, turn: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return a message in the form that templates take, and whether it is learned."""
        rest = {key: value for key, value in turn.items() if value is not None}
        role = rest.pop("role" if "role" in rest else "from")
        content = rest.pop("content" if "content" in rest else "value", None)
        marks = [self._mark(key, rest.pop(key)) for key in _MARKS if key in rest]
        if role == "function_call":  # of ShareGPT: the content is the call
            rest["tool_calls"], content = _from_json(content), ""
        if legacy := rest.pop("function_call", None):
            rest.setdefault("tool_calls", [legacy])
        calls = [self._tool_call(call) for call in _listed(rest.pop("tool_calls", None))]
        message: dict[str, Any] = {"role": _ROLES.get(role.lower(), role)}
        if content is not None or not calls:
            message["content"] = self._text(name, turn, content)
        learned = message["role"] == "assistant"
        if any(marks) and not learned:
            self._ignored.add(f"what marks messages with the role {role!r} to be learned (only answers are)")
        return message | rest | ({"tool_calls": calls} if calls else {}), learned and all(marks)

    def _text(self, name: str, turn: Any, content: Any) -> str:
        """Return the content of a message, whose parts are joined."""
        if isinstance(content, list):
            parts = [{"text": part} if isinstance(part, str) else part for part in content]
            for part in parts:
                kind = part.get("type", "text") if isinstance(part, dict) else None
                if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                    raise self.error(f"{name} has the part {part!r:.80}, but only text can be learned from")
            content = "".join(part["text"] for part in parts)
        if not isinstance(content, str):
            raise self._no_messages(name, [turn])
        return checked_text(content, self.place, "content")

    def _tool_call(self, call: Any) -> dict[str, Any]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise self.error("a call of a tool needs a function with a name", call)
        arguments = function.get("arguments")
        parsed = _from_json(arguments)
        parsed = {} if parsed is None else parsed
        try:
            json.dumps(parsed, allow_nan=False)
        except (TypeError, ValueError):
            parsed = None
        if not isinstance(parsed, dict):
            raise self.error(f"the arguments of {function['name']} are not a JSON object", arguments)
        # text stays as it is, for templates that show it; an object may have the columns of other rows
        is_text = bool(parsed) and isinstance(arguments, str)
        parsed = arguments if is_text else _known(parsed, self._schemas.get(function["name"]))
        return (call if "function" in call else {"type": "function"}) | {"function": {**function, "arguments": parsed}}

    def follow_marks(self) -> None:
        """Follow a field that says for the whole record, for each message or for each answer what is learned."""
        answers = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        for name in _MARKS.keys() & self.fields.keys():
            marks = self.fields[name]
            if isinstance(marks, str) and _ROLES.get(marks.lower()) == "user":
                marks = []  # NeMo's ``mask`` names who is not learned
            elif not isinstance(marks, list):
                if marks not in (0, 1) and _MARKS[name] is not None:
                    continue  # a weight of the record or another number, which is not used
                marks = [marks] * len(self.messages)
            elif len(marks) not in (len(self.messages), len(answers)):
                raise self.error(
                    f"{name} has {len(marks)} marks, but there are {len(self.messages)} messages with "
                    f"{len(answers)} answers"
                )
            del self.fields[name]
            numbers = answers if len(marks) == len(answers) else range(len(self.messages))
            for number, mark in zip(numbers, marks, strict=False):
                self.learned[number] &= self._mark(name, mark)

    def _mark(self, name: str, mark: Any) -> bool:
        """Return whether a mark says that an answer is learned."""
        if _MARKS[name] is None or not isinstance(mark, bool | int | float) or mark not in (0, 1):
            raise self.error(
                f"{name} is {mark!r:.80}, which can't be followed: an answer is learned or not (weight = 1 or 0)"
            )
        return bool(mark) == _MARKS[name]

    def add_system(self) -> None:
        """Put the system texts that stand beside the messages before them."""
        for name in ("system_prompt", "system"):
            if content := self.fields.pop(name, None):
                if not isinstance(content, str):
                    raise self.error(f"{name} must be text", content)
                content = checked_text(content, self.place, name)
                first = self.messages[0]
                if first["role"] != "system" or first.get("content", "").strip() != content.strip():
                    self.messages.insert(0, {"role": "system", "content": content})
                    self.learned.insert(0, False)

    def template_arguments(self) -> dict[str, Any]:
        more = _from_json(self.fields.pop("chat_template_kwargs", None)) or {}
        if not isinstance(more, dict):
            raise self.error("chat_template_kwargs must be an object", more)
        tools = [self._tool(tool) for tool in _listed(self.fields.pop("tools", more.get("tools")))]
        functions = [self._tool(function) for function in _listed(self.fields.pop("functions", None))]
        tools += [{"type": "function", "function": function} for function in functions]
        described = [tool.get("function", tool) for tool in tools]
        self._schemas = {str(each.get("name")): each.get("parameters") for each in described if isinstance(each, dict)}
        added = {"tools": tools, "documents": self.fields.pop("documents", None)}
        return more | {name: value for name, value in added.items() if value}

    def _tool(self, tool: Any) -> dict[str, Any]:
        """Return a tool as an object, without the nulls in its schema, which are no schemas."""
        if not isinstance(tool, dict):
            raise self.error("tools must be a list of objects, or the same as JSON", tool)
        function = tool.get("function", tool)
        if isinstance(function, dict) and "parameters" in function:
            function = {**function, "parameters": _from_json(function["parameters"])}
        plain: dict[str, Any] = _without_nulls(
            {**tool, "function": function} if "function" in tool else function, _VALUES
        )
        return plain


_SPEAKERS = ("user", "assistant")


def texts_of(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, also the names of fields, and those in a text that is itself JSON."""
    if isinstance(value, str):
        yield value
        if value[:1] in ("{", "[") and (parsed := _from_json(value)) is not value:
            yield from texts_of(parsed)
    elif isinstance(value, Mapping | list | tuple):
        for each in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
            yield from texts_of(each)


def _without_nulls(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """Return a value without the nulls of its structs, except those called as ``keep``; those in lists stay."""
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):  # a map
        value = dict(value)
    if isinstance(value, list):
        return [_without_nulls(each, keep) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each, keep) for key, each in value.items() if each is not None or key in keep}
    return value


def _known(arguments: Any, schema: Any) -> Any:
    """Return arguments without the nulls of names that are not in their schema."""
    if not isinstance(schema, dict):
        return arguments
    if isinstance(arguments, list):
        return [_known(each, schema.get("items")) for each in arguments]
    names = schema.get("properties")
    if not isinstance(arguments, dict) or not isinstance(names, dict):
        return arguments
    return {key: _known(each, names.get(key)) for key, each in arguments.items() if each is not None or key in names}


def _has_role(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role") or turn.get("from"), str)


def _from_json(value: Any) -> Any:
    """Return what a text says in JSON; the value itself if it is no such text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _listed(value: Any) -> list[Any]:
    """Return the elements of a list, or a value alone; both, and each element, may be written as JSON."""
    value = _from_json(value) or []
    return [_from_json(each) for each in (value if isinstance(value, list) else [value])]
