"""A tokenizer with the chat template of its model: it renders and tokenises conversations and finds the answers."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.data.files import checked_text
from diloco.data.tokenizer import Tokenizer, library_tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["ChatTokenizer", "Example", "Message", "has_template"]

Message = Mapping[str, Any]  # ``role``, ``content``, and whatever else the template accepts
Tools = Sequence[Mapping[str, Any]]  # descriptions of tools, for the template

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")
_NOW = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")
_DATE = datetime(2024, 7, 26)  # instead of the current date, on which no example may depend


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation as tokens."""

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
        named = library.chat_template
        self.template: str | None = "\n".join(map(str, named.values())) if isinstance(named, dict) else named
        added = library.added_tokens_decoder.values()
        special = sorted({*library.all_special_tokens, *(str(token) for token in added if token.special)})
        self._special = re.compile("|".join(re.escape(each) for each in sorted(special, key=len, reverse=True)))
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
        text = self._render(messages, (), answer_next=True)
        return [int(token) for token in self._tokens(text)[0]]

    def conversation(
        self, messages: Sequence[Message], learned: Sequence[bool] | None = None, tools: Tools = ()
    ) -> tuple[Example, bool]:
        """Tokenise a conversation. Its answers count, each with the tokens that end it.

        The template decides which tokens are answers: an answer runs from the end of the prompt for it to the end of
        the conversation up to it. If the template marks answers itself (``{% generation %}``), only what it marks
        counts. If the end of the prompt (``<think>``) is missing before an answer, the answer runs from where it
        differs from the prompt. ``learned`` says for each message whether it counts, if it is an answer.

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
        if _MARKS_ANSWERS.search(self._template_for(tools)):
            masks = self._applied(messages, tools, return_assistant_tokens_mask=True, return_dict=True)
            marked = np.array(masks["assistant_masks"], dtype=np.bool_)
            if chosen == answers:
                return self._example(tokens, marked), True
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
            prompt = self._render(messages[:number], tools, answer_next=True)
            if not whole.startswith(after):
                return None
            if after.startswith(prompt):
                return len(prompt), len(after)
            # texts and not paths, character by character
            begin = len(os.path.commonprefix([after, prompt]))  # noqa: RUF071  # of characters, not of paths
            return (begin, len(after)) if begin > len(self._render(messages[:number], tools)) else None
        except DataError:
            if is_last:
                raise
            return None

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
                "FILE.jinja), or the folder of a chat model."
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


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer in ``folder`` has a chat template."""
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        config.is_file() and '"chat_template"' in config.read_text("utf-8", errors="replace")
    )
