"""The tokens that a chat template writes around the texts of messages.

A template is a program, so they are found by rendering conversations whose texts are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from diloco.errors import DataError

Message: TypeAlias = Mapping[str, Any]  # ``role``, ``content``, and whatever else the template accepts
Tools: TypeAlias = Sequence[Mapping[str, Any]]  # descriptions of tools, for the template

_SYSTEM: Message = {"role": "system", "content": "System7"}
_TURNS: tuple[Message, ...] = (
    {"role": "user", "content": "Question7"},
    {"role": "assistant", "content": "Answer7"},
    {"role": "user", "content": "Question8"},
    {"role": "assistant", "content": "Answer8"},
)
_THOUGHT = dict.fromkeys(("thinking", "reasoning", "reasoning_content"), "Thought7")
_PROPERTIES = {"at": {"type": "string", "description": "Where."}}
_LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": _PROPERTIES}}
_TOOLS: Tools = ({"type": "function", "function": _LOOK},)
_CALL = {"type": "function", "id": "call00007", "function": {"name": "look", "arguments": {"at": "Place7"}}}
_CALLS: tuple[Message, ...] = (
    _TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "look", "tool_call_id": "call00007", "content": "Result7"},
    _TURNS[1],
)
_CALLS_TEXTS = ("Question7", "Place7", "Result7", "Answer7")


@dataclass(frozen=True)
class Marks:
    """What a template writes between the texts of a conversation. The defaults are those of one that nothing is known
    about."""

    ends: frozenset[int] = frozenset()  # tokens that end an answer
    end_is_learned: bool = True  # whether the loss counts one of them
    control: frozenset[int] = frozenset()  # tokens that begin or end a message of any role
    closing: str = ""  # text that follows an answer, up to the token that ends it


@dataclass(frozen=True)
class Probe:
    """What can be asked of a template and its tokenizer. The first and the last raise `DataError` if it refuses."""

    render: Callable[[Sequence[Message], Tools], str]
    added: Callable[[str], list[tuple[int, int]]]  # tokens of a text that are not made of pieces, with their places
    learned: Callable[[Sequence[Message], Tools], Collection[int]]  # the tokens of a conversation that count

    def marks(self) -> Marks:
        """Find the marks of the template, which may refuse any of the conversations."""
        for system in ([_SYSTEM], []):  # not every template takes a system message
            try:
                return self._of_turns(system)
            except DataError:
                continue
        return Marks()

    def _of_turns(self, system: Sequence[Message]) -> Marks:
        turns, question = [*system, *_TURNS], len(system)
        texts = [str(turn["content"]) for turn in turns]
        after_question = self._last(turns[: question + 1], texts[: question + 1])
        after_answer = self._last(turns[: question + 2], texts[: question + 2])
        openings = self._pieces(turns, texts)[:-1]
        control = self._ids(after_question) | self._ids(after_answer)
        for number, (turn, opening) in enumerate(zip(turns, openings, strict=True)):
            if turn["role"] == "assistant":
                # only what begins it: then may come what an answer may hold as well, such as <think>
                control |= self._first(opening.removeprefix(after_question))
            elif number or system:  # else it is the beginning of the conversation, which may be anything
                control |= self._ids(opening)
        candidates = self._first(after_answer)
        if not openings[question + 2].startswith(after_answer):  # an answer that is not the last ends otherwise
            candidates |= self._first(openings[question + 2])
        learned = {*self.learned(turns, ())}
        ends = candidates & learned or self._first(after_answer)
        is_learned = ends <= learned
        calls_ends, calls_begins = self._of_calls(ends)
        ends = (ends | calls_ends) - self._inside_answers() or ends
        begin = min((begin for index, begin in self.added(after_answer) if index in ends), default=None)
        return Marks(frozenset(ends), is_learned, frozenset(control | ends | calls_begins), after_answer[:begin])

    def _of_calls(self, ends: Collection[int]) -> tuple[set[int], set[int]]:
        """Return the tokens that end a call of a tool, if none of ``ends`` does, and those that begin a result."""
        try:
            after_call = self._last(_CALLS[:2], _CALLS_TEXTS[:2], _TOOLS)
            tokens = [index for index, _ in self.added(after_call)]
            last = {*tokens[-1:]} if not {*tokens} & {*ends} else set[int]()  # what precedes it is of the call
            last &= {*self.learned(_CALLS[:2], _TOOLS)}
        except DataError:
            return set(), set()
        try:
            opening = self._pieces(_CALLS, _CALLS_TEXTS, _TOOLS)[2]
        except DataError:
            return last, set()
        return last, self._first(opening.removeprefix(after_call))

    def _inside_answers(self) -> set[int]:
        """Return the tokens between the thoughts and the text of an answer."""
        messages = [_TURNS[0], {**_TURNS[1], **_THOUGHT}]
        try:
            return self._ids(self._pieces(messages, ["Question7", "Thought7", "Answer7"])[2])
        except DataError:
            return set()

    def _pieces(self, messages: Sequence[Message], texts: Sequence[str], tools: Tools = ()) -> list[str]:
        """Return what a conversation holds before, between and after ``texts``, or raise `DataError`."""
        rest, pieces = self.render(messages, tools), []
        for text in texts:
            before, found, rest = rest.partition(text)
            if not found:
                raise DataError(f"the template does not render {text}")
            pieces.append(before)
        return [*pieces, rest]

    def _last(self, messages: Sequence[Message], texts: Sequence[str], tools: Tools = ()) -> str:
        return self._pieces(messages, texts, tools)[-1]

    def _ids(self, text: str) -> set[int]:
        return {index for index, _ in self.added(text)}

    def _first(self, text: str) -> set[int]:
        return {index for index, _ in self.added(text)[:1]}
