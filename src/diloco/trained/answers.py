"""Answers of a model that was trained on conversations, and how many of them are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from diloco.data.chat import Question
from diloco.data.chat_tokenizer import ChatTokenizer
from diloco.errors import DataError
from diloco.model.language_model import LanguageModel
from diloco.trained.generate import generate
from diloco.trained.sampling import Sampling

__all__ = ["Answered", "answer", "answer_questions"]

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Answered:
    """A question, with what a model said."""

    question: Question
    said: str

    @property
    def right(self) -> bool:
        """Whether it is the answer to the letter, but for white space around it."""
        return self.said.strip() == self.question.answer.strip()


def answer(
    model: LanguageModel,
    tokenizer: ChatTokenizer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    window: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Iterator[int]:
    """The tokens of an answer, until the one that ends it; each is computed when asked for.

    Args:
        window: tokens that the model sees at most.
        sampling: how they are drawn; default: the likeliest token each time.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    tokens = generate(
        model,
        prompt,
        generator,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_token=tokenizer.answer_end,
        window=window,
    )
    for token in tokens:
        if token == tokenizer.eos_id:
            return
        yield token


def answer_questions(
    model: LanguageModel,
    tokenizer: ChatTokenizer,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    window: int,
) -> list[Answered]:
    """Ask a model every question, and take its likeliest answer.

    Raises:
        DataError: there are no questions.
    """
    if not questions:
        raise DataError("There is no question to answer. Nothing was evaluated.")
    found = []
    for question in questions:
        tokens = answer(model, tokenizer, question.prompt(tokenizer), max_new_tokens=max_new_tokens, window=window)
        found.append(Answered(question, tokenizer.decode(list(tokens))))
    return found
