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

from diloco.data.text import ArrowRow, RowError, checked_text

__all__ = ["Conversation", "parsed_arguments", "read_conversation", "texts_of"]

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

_SYSTEM = ("system", "system_prompt")
_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "tool_response", "function_response"), "tool"),
    "system": "system",
}
"""What ShareGPT and others call the roles; other names are passed on to the template."""

_LEARNED = ("weight", "loss_weight", "loss_scale", "train", "trainable", "loss", "loss_mask")  # 0: not learned
_MASKS = ("completion_mask", "assistant_mask", "assistant_masks")  # the same, of a whole record
_HIDDEN = ("masked",)  # 1: not learned
_UNCLEAR = ("mask", "train_detail")  # 1 means either in different formats; parts of an answer can't be told apart

_VALUES = ("default", "const", "example", "examples", "enum")  # keywords of JSON Schema whose values may be null


@dataclass(frozen=True)
class Conversation:
    """A record in the form that chat templates take."""

    messages: tuple[dict[str, Any], ...] = ()
    learned: tuple[bool, ...] = ()  # of each message; only the assistant's are learned
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the template, such as ``tools``
    text: str | None = None  # the text of a record without messages
    needs_template: bool = False  # False: without a template, the texts are joined
    unused: frozenset[str] = frozenset()  # what is not used, as phrases


def read_conversation(place: str, record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record.

    Args:
        place: the location of the record, for messages.

    Raises:
        RowError: the record has none of the known fields, they are malformed, or their marks of what to learn can't be
            followed.
    """
    given = _without_nulls(record) if isinstance(record, ArrowRow) else record
    reading = _Reading(place, {name: value for name, value in given.items() if value is not None})
    source = reading.turns() or reading.pair()
    if source:
        reading.record_marks()
        reading.system()
        return Conversation(
            messages=tuple(reading.messages),
            learned=tuple(reading.learned),
            arguments=reading.template_arguments(),
            needs_template=source == "messages",
            unused=reading.unused(),
        )
    if "text" in record:
        text = checked_text(reading.fields.pop("text", None), place, "text")
        return Conversation(text=text, unused=reading.unused())
    raise RowError(
        f"{place} has the fields {', '.join(map(repr, sorted(record)))}. A conversation needs 'messages', 'prompt' "
        "and 'completion', or 'text'."
    )


class _Reading:
    """A record while it is read: a field is taken out of ``fields`` when it is used."""

    def __init__(self, place: str, fields: dict[str, Any]) -> None:
        self.place = place
        self.fields = fields
        self.messages: list[dict[str, Any]] = []
        self.learned: list[bool] = []
        self._ignored: set[str] = set()

    def unused(self) -> frozenset[str]:
        return frozenset({f"the field {name!r}" for name in self.fields} | self._ignored)

    def error(self, problem: str) -> RowError:
        return RowError(f"{self.place}: {problem}.")

    def turns(self) -> str:
        """Read the first field that holds a list of messages, and return its name; "" if there is none."""
        alone = "chosen" if "prompt" not in self.fields and isinstance(self.fields.get("chosen"), list) else ""
        name = next((name for name in _TURNS if name in self.fields), alone)
        if name:
            self.add(name, _from_json(self.fields.pop(name)))
        return name

    def pair(self) -> str:
        """Read a question and its answer, each a text or messages, and return their names; "" if there are none."""
        names = next((pair for pair in _PAIRS if pair[0] in self.fields and pair[2] in self.fields), None)
        if names is None:
            return ""
        question, more, answer = (self.fields.pop(name, None) for name in names)
        together = f"{names[0]} and {names[2]}"
        if more:
            if not isinstance(question, str) or not isinstance(more, str):
                raise self.error(f"{names[0]} and {names[1]} must both be text")
            question = f"{question}\n\n{more}"
        before = self.fields.pop("history", [])  # earlier questions and answers, in Alpaca's format
        if not isinstance(before, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in before):
            raise self.error("history must be a list of pairs of a question and its answer")
        asked, answered = _messages("user", question), _messages("assistant", answer)
        if not asked or not answered:
            raise self.error(f"{together} must both be text, or lists of messages")
        for earlier, reply in before:
            self.add("history", [*_messages("user", earlier), *_messages("assistant", reply)])
        self.add(together, answered if answered[: len(asked)] == asked else [*asked, *answered])
        return together

    def add(self, name: str, turns: Any) -> None:
        """Append the messages of a field."""
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise self._no_messages(name, turns)
        for turn in turns:
            message, learned = self._turn(name, turn)
            self.messages.append(message)
            self.learned.append(learned)

    def _no_messages(self, name: str, given: Any) -> RowError:
        return self.error(f"{name} must be a list of messages whose role and content are text, got {repr(given)[:80]}")

    def _turn(self, name: str, turn: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return a message in the form that templates take, and whether it is learned."""
        rest = {key: value for key, value in turn.items() if value is not None}
        role = rest.pop("role" if "role" in rest else "from", None)
        content = rest.pop("content" if "content" in rest else "value", None)
        if not isinstance(role, str):
            raise self._no_messages(name, [turn])
        marks = [self._mark(key, rest.pop(key)) for key in (*_LEARNED, *_HIDDEN, *_UNCLEAR) if key in rest]
        if role == "function_call":  # of ShareGPT: the content is the call
            rest["tool_calls"], content = _from_json(content), ""
        if legacy := rest.pop("function_call", None):
            rest.setdefault("tool_calls", [legacy])
        calls = self._tool_calls(rest.pop("tool_calls", None))
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
                kind = part.get("type", "text") if isinstance(part, dict) else part
                if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                    raise self.error(f"{name} has content of the type {kind!r}, but only text can be learned from")
            content = "".join(part["text"] for part in parts)
        if not isinstance(content, str):
            raise self._no_messages(name, [turn])
        return checked_text(content, self.place, "content")

    def _tool_calls(self, calls: Any) -> list[dict[str, Any]]:
        calls = _from_json(calls) or []
        normal = []
        for call in calls if isinstance(calls, list) else [calls]:
            call = _from_json(call)
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise self.error(f"a call of a tool needs a function with a name, got {repr(call)[:80]}")
            if function.get("arguments") is None:
                function = {**function, "arguments": {}}
            try:
                json.dumps(parsed_arguments(function["arguments"]), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise self.error(f"the arguments of {function['name']} are not a JSON object ({error})") from error
            normal.append((call if "function" in call else {"type": "function"}) | {"function": function})
        return normal

    def record_marks(self) -> None:
        """Follow a field that says for the whole record, for each message or for each answer what is learned."""
        answers = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        for name in (*_LEARNED, *_MASKS, *_HIDDEN, *_UNCLEAR):
            marks = self.fields.get(name)
            if isinstance(marks, str) and _ROLES.get(marks.lower()) == "user":
                marks = True  # NeMo's ``mask`` names who is not learned
            elif isinstance(marks, list):
                if len(marks) not in (len(self.messages), len(answers)):
                    raise self.error(
                        f"{name} has {len(marks)} marks, but there are {len(self.messages)} messages with "
                        f"{len(answers)} answers"
                    )
                marks = [self._mark(name, mark) for mark in marks]
            elif marks in (0, 1) or (name in _UNCLEAR and marks is not None):
                marks = self._mark(name, marks)
            else:
                continue  # a weight of the record or another number, which is not used
            del self.fields[name]
            numbers = answers if isinstance(marks, list) and len(marks) == len(answers) else range(len(self.messages))
            for place, number in enumerate(numbers):
                self.learned[number] &= marks[place] if isinstance(marks, list) else marks

    def _mark(self, name: str, mark: Any) -> bool:
        """Return whether a mark says that an answer is learned."""
        if name in _UNCLEAR:
            raise self.error(f"{name} = {repr(mark)[:80]} can't be followed. Mark answers not to learn with weight = 0")
        if not isinstance(mark, bool | int | float) or mark not in (0, 1):
            raise self.error(f"{name} is {repr(mark)[:80]}, but an answer is learned (1) or not (0)")
        return bool(mark) != (name in _HIDDEN)

    def system(self) -> None:
        """Put the system texts that stand beside the messages before them."""
        for name in reversed(_SYSTEM):
            if content := self.fields.pop(name, None):
                if not isinstance(content, str):
                    raise self.error(f"{name} must be text, got {repr(content)[:80]}")
                message = {"role": "system", "content": checked_text(content, self.place, name)}
                if self.messages[:1] != [message]:
                    self.messages.insert(0, message)
                    self.learned.insert(0, False)

    def template_arguments(self) -> dict[str, Any]:
        more = self.fields.pop("chat_template_kwargs", None) or {}
        if not isinstance(more, dict):
            raise self.error(f"chat_template_kwargs must be an object, got {repr(more)[:80]}")
        tools = self._tools(self.fields.pop("tools", None))
        tools += [{"type": "function", "function": each} for each in self._tools(self.fields.pop("functions", None))]
        documents = self.fields.pop("documents", None)
        if tools:
            self._drop_foreign(tools)
        return more | ({"tools": tools} if tools else {}) | ({"documents": documents} if documents else {})

    def _tools(self, tools: Any) -> list[dict[str, Any]]:
        tools = _from_json(tools) or []
        tools = [_from_json(tool) for tool in (tools if isinstance(tools, list) else [tools])]
        for tool in tools:
            if not isinstance(tool, dict):
                raise self.error(f"tools must be a list of objects, or the same as JSON, got {repr(tool)[:80]}")
            function = tool.get("function", tool)
            if isinstance(function, dict) and isinstance(function.get("parameters"), str):
                function["parameters"] = _from_json(function["parameters"])
        return [_schema(tool) for tool in tools]

    def _drop_foreign(self, tools: list[dict[str, Any]]) -> None:
        """Drop null arguments that the called tool does not have: other rows' columns, written out as JSON."""
        functions = [tool.get("function", tool) for tool in tools]
        schemas = {each.get("name"): each.get("parameters") for each in functions if isinstance(each, dict)}
        for message in self.messages:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                function["arguments"] = _known(function["arguments"], schemas.get(function["name"]))


def parsed_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call, which may be written as JSON; raise `ValueError` if they are no object."""
    parsed = (json.loads(arguments) if arguments.strip() else {}) if isinstance(arguments, str) else arguments
    if not isinstance(parsed, dict):
        raise ValueError(f"{repr(arguments)[:80]}")
    return parsed


def texts_of(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, without the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from texts_of(each)


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls of its structs; those in lists stay."""
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):  # a map
        return {key: _without_nulls(each) for key, each in value}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def _messages(role: str, value: Any) -> list[Any]:
    """Return a question or an answer as messages; none if it is neither text nor messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) else []


def _from_json(value: Any) -> Any:
    """Return what a text says in JSON; the value itself if it is no such text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _schema(value: Any) -> Any:
    """Return a JSON schema without nulls, which are no schemas; values such as a default may be null."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: each if key in _VALUES else _schema(each)
        for key, each in value.items()
        if each is not None or key in _VALUES
    }


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
