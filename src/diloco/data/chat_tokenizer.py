"""A tokenizer with the chat template of its model: it renders and tokenises conversations and finds the answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.data.rows import Example
from diloco.data.tokenizer import Tokenizer
from diloco.data.tokenizer_choice import library_tokenizer
from diloco.errors import ConfigurationError, DataError

__all__ = ["ChatTokenizer", "Message", "has_template"]

Message = Mapping[str, Any]  # ``role``, ``content``, and whatever else the template accepts

_TEMPLATE_FILE = "chat_template.jinja"
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")


class ChatTokenizer(Tokenizer):
    """The tokenizer of a ``transformers`` folder, with its chat template and special tokens.

    Args:
        place: the folder, or ``hf:NAME``.
        template: a Jinja file to use instead of the folder's own template.

    Raises:
        ConfigurationError: ``transformers`` is not installed, or the template file can't be read.
        DataError: as `library_tokenizer` and `Tokenizer`, or the template can't be used.
    """

    def __init__(self, place: str, template: Path | None = None) -> None:
        library = library_tokenizer(place, "finetune", "A conversation needs transformers")
        super().__init__(library.backend_tokenizer.to_str(), eos=str(library.eos_token), source=place)
        if template is not None:
            try:
                library.chat_template = template.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"data.chat_template={template} can't be read: {error}.") from error
        self._library = library
        self._place = place
        # the template; None: there is none, so only prompts, completions and plain text can be read
        self.template: str | None = library.chat_template
        added = library.added_tokens_decoder.values()
        special = {*library.all_special_tokens, *(str(token) for token in added if token.special)}
        self._special = re.compile("|".join(re.escape(each) for each in sorted(special, key=len, reverse=True)))
        self._special_ids = set(library.convert_tokens_to_ids(sorted(special)))
        first = library("").input_ids  # the tokens that the tokenizer adds before a text
        self._first = [index for index in first if index != self.eos_id]
        self.answer_end = self._find_answer_end() if self.template else self.eos_id  # the token that ends an answer

    def save(self, folder: Path) -> None:
        """Write the files of `Tokenizer.save`, the template, and everything else that the library saves."""
        folder.mkdir(parents=True, exist_ok=True)
        self._library.save_pretrained(folder)

    def holds_special(self, text: str) -> bool:
        """Return whether a text spells out a special token, which would end its own part of a conversation."""
        return self._special.search(text) is not None

    def prompt(self, messages: Sequence[Message], **more: Any) -> list[int]:
        """Return the tokens of the prompt for the answer to ``messages``.

        Raises:
            DataError: there is no template, or it refuses the messages.
        """
        return [int(token) for token in self._tokens(self._render(messages, answer_next=True, **more))[0]]

    def plain_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt without a template."""
        return [*self._first, *map(int, self._tokens(text)[0])]

    def completion(self, prompt: str, text: str) -> Example:
        """Tokenise a prompt and its completion without a template; the completion and the final token count."""
        tokens, spans = self._tokens(prompt + text)
        counted = spans[:, 1] > len(prompt)
        tokens = np.array([*self._first, *tokens, self.eos_id], dtype=self.dtype)
        counted = np.array([*([False] * len(self._first)), *counted, True])
        counted[0] = False
        return Example(tokens, counted)

    def conversation(self, messages: Sequence[Message], **more: Any) -> tuple[Example, bool]:
        """Tokenise a conversation. Its answers count, each with the tokens that end it.

        The template decides which tokens are answers: an answer runs from the end of the prompt for it to the end of
        the conversation up to it. If the template marks the answers itself (``{% generation %}``), those marks are
        used.

        Args:
            more: further arguments of the template, such as ``tools``.

        Returns:
            The example, and whether all answers count. Some templates render earlier answers differently once another
            message follows (without their reasoning); then only the last answer counts.

        Raises:
            DataError: the template refuses the conversation, or does not render the last answer right after the prompt
                for it.
        """
        whole = self._render(messages, **more)
        tokens, spans = self._tokens(whole)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if _MARKS_ANSWERS.search(self.template or ""):
            marked = self._library.apply_chat_template(
                [dict(message) for message in messages], return_assistant_tokens_mask=True, return_dict=True, **more
            )
            return self._example(np.array(marked["input_ids"]), np.array(marked["assistant_masks"], dtype=bool)), True
        counted = np.zeros(len(tokens), dtype=np.bool_)
        all_count = True
        for number in answers:
            before = self._render(messages[:number], answer_next=True, **more)
            after = whole if number == len(messages) - 1 else self._render(messages[: number + 1], **more)
            if after.startswith(before) and whole.startswith(after):
                counted |= (spans[:, 1] > len(before)) & (spans[:, 0] < len(after))
            elif number == answers[-1]:
                raise DataError(
                    f"The chat template of {self._place} does not render an answer after the prompt for it, so the "
                    f"tokens to learn can't be found. The conversation begins with {whole[:60]!r}. Give a template "
                    "with {% generation %} (data.chat_template)."
                )
            else:
                all_count = False
        return self._example(tokens, counted), all_count

    def _example(self, tokens: NDArray[Any], counted: NDArray[np.bool_]) -> Example:
        counted[:1] = False
        return Example(tokens.astype(self.dtype), counted)

    def _tokens(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the ``(n,)`` tokens of a text, special ones included, and their character ranges, ``(n, 2)``."""
        encoded = self._library(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(encoded["input_ids"], dtype=self.dtype), spans

    def _render(self, messages: Sequence[Message], *, answer_next: bool = False, **more: Any) -> str:
        if self.template is None:
            raise DataError(
                f"{self._place} has no chat template, which messages need. Give a template (--data.chat-template "
                "FILE.jinja), the folder of a chat model, or records with prompt and completion."
            )
        given = [copy.deepcopy(dict(message)) for message in messages]
        try:
            rendered: str = self._library.apply_chat_template(
                given, tokenize=False, add_generation_prompt=answer_next, **more
            )
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(
                f"The chat template of {self._place} refused a conversation with the roles "
                f"{', '.join(str(message['role']) for message in messages)}: {error}"
            ) from error
        return rendered

    def _find_answer_end(self) -> int:
        """Return the first special token after an answer."""
        answer = "answer"
        rendered = self._render([{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}])
        rest = rendered[rendered.rindex(answer) + len(answer) :]
        return next((int(index) for index in self._tokens(rest)[0] if index in self._special_ids), self.eos_id)


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer in ``folder`` has a chat template."""
    if (folder / _TEMPLATE_FILE).is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and '"chat_template"' in config.read_text("utf-8", errors="replace")
