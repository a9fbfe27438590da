"""Generate text with a trained model, token by token, with a cache of keys and values."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.data import ChatTokenizer, Question, Tokenizer
from diloco.errors import ConfigurationError, DataError
from diloco.model import LanguageModel
from diloco.trained.sampling import Sampling

__all__ = ["Answered", "TextStream", "answer", "answer_questions", "generate", "generate_together"]

DEFAULT = Sampling()


def generate(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    generator: torch.Generator,
    *,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    stop_token: int | None = None,
    window: int | None = None,
    agreed: Callable[[int], int] = int,
) -> Iterator[int]:
    """Continue ``prompt_tokens`` once, as `generate_together` does.

    Returns:
        An iterator of the new tokens, without the prompt and ``stop_token``; each is computed when requested.
    """
    together = generate_together(
        model,
        prompt_tokens,
        [generator],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_token=stop_token,
        window=window,
        agreed=agreed,
    )
    return _only(together)


def generate_together(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    generators: Sequence[torch.Generator],
    *,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    stop_token: int | None = None,
    window: int | None = None,
    agreed: Callable[[int], int] = int,
) -> Generator[tuple[int | None, ...]]:
    """Continue one prompt several times in one batch. The model is in evaluation mode meanwhile.

    A token sees at most the ``window - 1`` tokens before it. When the window is full, its second half is processed
    again, and generation continues from there. So a token costs at most two forward passes of one token on average, and
    always sees at least half a window (or all there is).

    Each text equals the one that its generator gives alone, except for the round-off of the logits. That depends on the
    batch size, and may decide between tokens whose probabilities are equal to the last bits.

    Args:
        model: a model on any device; its own mode is restored afterwards.
        prompt_tokens: token ids, at least one; if the prompt is longer than the window, only its end is used.
        generators: random generators on the model's device, one for each text.
        max_new_tokens: tokens to generate, at least 0.
        stop_token: end when the model generates this token.
        window: tokens of context; default: the model's ``max_sequence_length``. A model performs poorly beyond the
            sequence length of its training, so that length is a good choice.
        agreed: returns the token on which all ranks that share the model agree, from the one that this rank has drawn.

    Returns:
        An iterator of the next token of each text, None for one that has ended; it ends when all texts have ended.

    Raises:
        ConfigurationError: an argument is out of range; raised at once.
        NonFiniteError: the logits are not finite; raised when that token is requested.
    """
    longest, vocabulary = model.max_sequence_length, model.vocab_size
    window = longest if window is None else window
    device = next(model.parameters()).device
    _check(max_new_tokens >= 0, f"max_new_tokens must be at least 0, got {max_new_tokens}.")
    _check(1 <= window <= longest, f"window must be between 1 and model.max_sequence_length={longest}, got {window}.")
    _check(len(prompt_tokens) >= 1, "The prompt is empty. Give at least one token, such as the end-of-document token.")
    for token in (*prompt_tokens, *(() if stop_token is None else (stop_token,))):
        _check(0 <= token < vocabulary, f"The token {token} is not in the model's vocabulary, 0 to {vocabulary - 1}.")
    _check(len(generators) >= 1, "There is no generator. Give one for each text.")
    for generator in generators:
        _check(
            generator.device.type == device.type,
            f"The generator is on {generator.device}, but the model is on {device}. Use "
            f'torch.Generator("{device.type}").',
        )

    def together() -> Generator[tuple[int | None, ...]]:
        texts = [list(prompt_tokens) for _ in generators]
        ended = [False] * len(texts)
        unread, cache, was_training = window, model.new_cache(), model.training
        model.eval()
        try:
            for _ in range(max_new_tokens):
                if cache.length + unread > window:
                    unread, cache = max(1, window // 2), model.new_cache()
                # Not around the yield, where it would also apply to the consumer's code. Not inference mode: parameters
                # that FSDP gathers in it could not be trained afterwards.
                with torch.no_grad():
                    # Not `__call__`: a compiled model would be recompiled for every length of the cache.
                    call: Callable[..., Tensor] = model._call_impl
                    tokens = torch.tensor([text[-unread:] for text in texts], dtype=torch.int64, device=device)
                    logits = call(tokens, cache)[:, -1]
                    for number, (text, of_text) in enumerate(zip(texts, logits.float(), strict=True)):
                        # A text that has ended repeats its last token, because the others are in the same batch.
                        token = text[-1] if ended[number] else agreed(sampling.draw(of_text, text, generators[number]))
                        text.append(token)
                        ended[number] = token == stop_token
                if all(ended):
                    break
                unread = 1
                yield tuple(None if done else text[-1] for text, done in zip(texts, ended, strict=True))
        finally:
            model.train(was_training)

    return together()


def _only(together: Generator[tuple[int | None, ...]]) -> Iterator[int]:
    """Yield the tokens of a single text."""
    with closing(together):
        for (token,) in together:
            assert token is not None, "the batch ends with its only text"
            yield token


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(message)


class TextStream:
    """Decodes tokens into whole characters as soon as they are certain; in total, the result equals `Tokenizer.decode`.

    Args:
        stops: texts that end the stream. The one that is complete first, and all that follows, is left out.

    >>> from diloco.data.tokenizer import ByteTokenizer
    >>> text = TextStream(ByteTokenizer(), stops=["END"])
    >>> [text.feed(byte) for byte in "né Er END.".encode()], text.stopped
    (['n', '', 'é', ' ', '', 'Er', ' ', '', '', '', ''], True)
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ConfigurationError("A stop text must not be empty.")
        self.stopped = False  # whether one of ``stops`` has occurred; later tokens are ignored
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """Return the text that has become certain with this token."""
        return "" if self.stopped else self._take(self._decoder.decode(self._tokenizer.as_bytes(token)))

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.stopped:
            return ""
        given = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return given + ("" if self.stopped else rest)

    def _take(self, text: str) -> str:
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        keep = max((self._partial_length(stop) for stop in self._stops), default=0)
        certain = len(self._held) - keep
        given, self._held = self._held[:certain], self._held[certain:]
        return given

    def _partial_length(self, stop: str) -> int:
        """Return how many characters at the end of the held text may be the beginning of ``stop``."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Answered:
    """A question and the model's answer to it."""

    question: Question
    text: str

    @property
    def right(self) -> bool:
        """Whether the answer equals the expected one, except for surrounding white space."""
        return self.text.strip() == self.question.answer.strip()


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
    """Yield the tokens of an answer up to the one that ends it; each is computed when requested.

    Args:
        window: the most tokens that the model sees.
        sampling: how tokens are drawn; default: the likeliest token each time.
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
    """Ask a model every question and return its likeliest answers.

    Raises:
        DataError: there are no questions.
    """
    if not questions:
        raise DataError("There are no questions to answer.")
    found = []
    for question in questions:
        tokens = answer(model, tokenizer, question.prompt(tokenizer), max_new_tokens=max_new_tokens, window=window)
        found.append(Answered(question, tokenizer.decode(list(tokens))))
    return found
