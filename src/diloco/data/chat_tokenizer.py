"""A tokenizer with the chat template of its model: it renders and tokenises conversations and finds the answers."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.data.text import checked_text, warn_once
from diloco.data.tokenizer import Tokenizer, library_tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["ChatTokenizer", "Example", "Message", "has_template"]

Message = Mapping[str, Any]  # ``role``, ``content``, and whatever else the template accepts
Tools = Sequence[Mapping[str, Any]]  # descriptions of tools, for the template

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
_OTHER = "\1"  # a text that no answer begins with
_NOW = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")
_DATE = datetime(2024, 7, 26)  # instead of the current date, on which no example may depend
_ROLE_NAMES = (("developer", "system"), ("function", "tool"))  # a later name of a role, and what templates call it


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation or document as tokens."""

    tokens: NDArray[Any]  # ``(n,)`` integers
    # ``(n,)`` bool: whether the loss counts a token; False for the first, which is not predicted
    counted: NDArray[np.bool_]


class ChatTokenizer(Tokenizer):
    """The tokenizer of a ``transformers`` folder, with its chat template and special tokens.

    Args:
        place: the folder, or ``hf:NAME``.
        template: a Jinja file to use instead of the folder's own template.

    """

    def __init__(self, place: str, template: Path | None = None) -> None:
        library = library_tokenizer(place, "finetune", "A conversation needs transformers")
        super().__init__(library.backend_tokenizer.to_str(), eos=str(library.eos_token), source=place)
        if template is not None:
            try:
                library.chat_template = template.read_text("utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"data.format={template} can't be read: {error}.") from error
        self._library, self._place = library, place
        # the template; None: there is none, so only prompts, completions and plain text can be read
        named = library.chat_template
        self.template: str | None = "\n".join(map(str, named.values())) if isinstance(named, dict) else named
        added = library.added_tokens_decoder.values()
        special = sorted({*library.all_special_tokens, *(str(token) for token in added if token.special)})
        self._special = re.compile("|".join(re.escape(each) for each in sorted(special, key=len, reverse=True)))
        self._first = [index for index in library("").input_ids if index != self.eos_id]  # added before a text
        self.answer_end = self.eos_id  # the token that ends an answer: the first special one after it
        if self.template:
            answer = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
            _, shown, rest = self._render(answer, ()).rpartition("answer")
            ids = {*library.convert_tokens_to_ids(special)} if shown else set()
            self.answer_end = next((int(index) for index in self._tokens(rest)[0] if index in ids), self.eos_id)

    def save(self, folder: Path) -> None:
        """Write the files of `Tokenizer.save`, the template, and everything else that the library saves."""
        folder.mkdir(parents=True, exist_ok=True)
        self._library.save_pretrained(folder)

    def holds_special(self, text: str) -> bool:
        """Return whether a text spells out a special token, which would end its own part of a conversation."""
        return self._special.search(text) is not None

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the prompt for the answer to ``messages``, as `conversation` tokenises them."""
        text = self._render(self._adapted(messages, ()), (), answer_next=True)
        return [int(token) for token in self._tokens(text)[0]]

    def completion(self, prompt: str, text: str) -> Example:
        """Tokenise a prompt and its completion without a template; the completion and the final token count."""
        tokens, spans = self._tokens(prompt + text)
        counted = [*([False] * len(self._first)), *(spans[:, 1] > len(prompt)), True]
        return self._example(np.array([*self._first, *tokens, self.eos_id]), np.array(counted))

    def conversation(
        self, messages: Sequence[Message], learned: Sequence[bool] | None = None, tools: Tools = ()
    ) -> tuple[Example, bool]:
        """Tokenise a conversation. Its answers count, each with the tokens that end it.

        The template decides which tokens are answers: an answer runs from the end of the prompt for it to the end of
        the conversation up to it. If the template marks the answers itself (``{% generation %}``), those marks are
        used. An answer that lacks the end of the prompt (``<think>``), or has no prompt because the conversation begins
        with it, runs from where its own text begins.

        Args:
            learned: for each message whether it counts, if it is an answer. Default: all.
            tools: passed to the template.

        Returns:
            The example, and whether all answers to learn count. Some templates render earlier answers differently once
            another message follows (without their reasoning), or refuse what precedes them; these don't count.

        Raises:
            DataError: the template refuses the conversation, or does not render the last answer after its prompt.
        """
        messages = self._adapted(messages, tools)
        whole = self._render(messages, tools)
        tokens, spans = self._tokens(whole)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = [number for number in answers if learned is None or learned[number]]
        if chosen and "".join(messages[chosen[-1]].get("content", "").split()) not in "".join(whole.split()):
            warn_once(
                f"The chat template of {self._place} does not show the whole text of all answers (often not their "
                "reasoning). What it leaves out is not learned."
            )
        marked = np.ones(len(tokens), dtype=np.bool_)
        if _MARKS_ANSWERS.search(self._template_for(tools)):
            masks = self._applied(messages, tools, return_assistant_tokens_mask=True, return_dict=True)
            marked = np.array(masks["assistant_masks"], dtype=np.bool_)
            stretch = np.cumsum(marked & np.diff(marked, prepend=False)) - 1  # of marked tokens, in which a token is
            if chosen == answers:
                return self._example(tokens, marked), True
            if stretch[-1] + 1 == len(answers):
                kept = [place for place, number in enumerate(answers) if number in chosen]
                return self._example(tokens, marked & np.isin(stretch, kept)), True
        counted = np.zeros(len(tokens), dtype=np.bool_)
        all_count = True
        for number in chosen:
            span = self._span(messages, number, whole, tools)
            if span is not None:
                counted |= (spans[:, 1] > span[0]) & (spans[:, 0] < span[1])
            elif number == answers[-1]:
                raise DataError(
                    f"The chat template of {self._place} does not render an answer after the prompt for it, so the "
                    f"tokens to learn can't be found. The conversation begins with {whole[:60]!r}. Give a template "
                    "with {% generation %} (--data.format FILE.jinja)."
                )
            else:
                all_count = False
        return self._example(tokens, counted & marked), all_count

    def _span(self, messages: Sequence[Message], number: int, whole: str, tools: Tools) -> tuple[int, int] | None:
        """Return where an answer begins and ends in the text of its conversation; None if that isn't clear."""
        is_last = number == len(messages) - 1
        try:
            after = whole if is_last else self._render(messages[: number + 1], tools)
            if not whole.startswith(after):
                return None
            prompt = self._render(messages[:number], tools, answer_next=True) if number else ""
            if number and after.startswith(prompt):
                return len(prompt), len(after)
            others = [{"role": role, "content": _OTHER} for role in ("assistant", "user")]
            other = self._render([*messages[:number], *others], tools)  # an earlier answer, without its thoughts
            before = self._render(messages[:number], tools) if number else ""
        except DataError:
            if is_last:
                raise
            return None
        # texts and not paths, character by character
        begin = os.path.commonprefix([after, other, *([prompt] if number else [])])  # noqa: RUF071
        return None if number and len(begin) <= len(before) else (len(begin), len(after))

    def _adapted(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Return messages with the roles that the template knows, and arguments of calls in the form that it prints.

        Some templates expect objects, others JSON; they refuse the other, or show it as a string in quotes or as a
        Python dictionary. Some also refuse calls without content.
        """
        adapted = [dict(message) for message in messages]
        for message, (role, other) in itertools.product(adapted, _ROLE_NAMES):
            known = re.search(rf"[=,(] *['\"]{role}['\"]", self.template or "")
            if message["role"] == role and not known and other in (self.template or ""):
                message["role"] = other
        arguments = [call["function"]["arguments"] for each in adapted for call in each.get("tool_calls", ())]
        if self.template is None or not arguments:
            return adapted
        wrong = [
            text
            for each in arguments
            if each
            for text in (repr(_as_object(each)), json.dumps(_as_json(each), ensure_ascii=False))
        ]
        forms: list[tuple[bool, list[dict[str, Any]]]] = []  # that the template takes, and whether it shows them wrong
        refused: DataError | None = None
        for content, form in itertools.product(({}, {"content": ""}), (_as_object, _as_json)):
            candidate = copy.deepcopy([content | message for message in adapted])
            for call in [call for message in candidate for call in message.get("tool_calls", ())]:
                call["function"]["arguments"] = form(call["function"]["arguments"])
            try:
                text = self._render(candidate, tools)
                forms.append((any(each in text for each in wrong), candidate))
            except DataError as error:
                refused = refused or error
        if refused is not None and not forms:
            raise refused
        return min(forms, key=lambda each: each[0])[1]

    def _example(self, tokens: NDArray[Any], counted: NDArray[np.bool_]) -> Example:
        counted[:1] = False
        return Example(tokens.astype(self.dtype), counted)

    def _tokens(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ``(n,)`` tokens of a text, special ones included, and their character ranges, ``(n, 2)``."""
        encoded = self._library(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(encoded["input_ids"], dtype=self.dtype), spans

    def _template_for(self, tools: Tools) -> str:
        """Return the template, of several the one that the library takes; it shows one date, whatever the day is."""
        template = self._library.get_chat_template(tools=tools or None)
        return _NOW.sub(lambda now: repr(_DATE.strftime(now[2])), template)

    def _render(self, messages: Sequence[Message], tools: Tools, *, answer_next: bool = False) -> str:
        if self.template is None:
            raise DataError(
                f"{self._place} has no chat template, which messages need. Give a template (--data.format "
                "FILE.jinja), the folder of a chat model, or records with prompt and completion."
            )
        text = str(self._applied(messages, tools, tokenize=False, add_generation_prompt=answer_next))
        return checked_text(text, self._place, "conversation")  # a role may hold what is no text

    def _applied(self, messages: Sequence[Message], tools: Tools, **how: Any) -> Any:
        copies = [copy.deepcopy(dict(message)) for message in messages]
        try:
            template = self._template_for(tools)
            return self._library.apply_chat_template(copies, chat_template=template, tools=tools or None, **how)
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(
                f"The chat template of {self._place} refused a conversation with the roles "
                f"{', '.join(str(message['role']) for message in messages)}: {str(error).rstrip('.')}."
            ) from error


def _as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer in ``folder`` has a chat template."""
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        config.is_file() and '"chat_template"' in config.read_text("utf-8", errors="replace")
    )
