"""Text from a trained model: one token after the other, with a cache of keys and values."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.data.chat import Question
from diloco.data.chat_tokenizer import ChatTokenizer
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigurationError, DataError
from diloco.model.language_model import LanguageModel
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
) -> Iterator[int]:
    """Continue ``prompt_tokens`` once, as `generate_together` does.

    Returns:
        An iterator of the new tokens, without the prompt and without ``stop_token``; each is computed when asked for.
    """
    together = generate_together(
        model,
        prompt_tokens,
        [generator],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_token=stop_token,
        window=window,
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
) -> Generator[tuple[int | None, ...]]:
    """Continue one prompt several times, in one batch; the model is in evaluation mode meanwhile.

    A token is seen together with at most the ``window - 1`` before it. When the window is full, its later half is read
    anew and generation goes on from there: a token costs at most two forward passes of one token on average, and always
    sees at least half a window (or all there is).

    Each text is the one that its generator gives alone, but for the round-off of the logits, which depends on the size
    of the batch and may decide between tokens that are equally likely to the last bits.

    Args:
        model: on any device; its own mode is put back afterwards.
        prompt_tokens: token ids, at least one; of a prompt longer than the window, its end is read.
        generators: of the draws, one for each text, on the model's device.
        max_new_tokens: tokens to generate, at least 0.
        stop_token: end when the model gives this token.
        window: tokens of context; default: the model's ``max_sequence_length``. A model does poorly beyond the
            sequence length it was trained with, so that length is the one to give.

    Returns:
        An iterator of the next token of each text, None for one that has ended; it ends when all have.

    Raises:
        ConfigurationError: for an argument that cannot work; at once.
        NonFiniteError: if the model gives logits that are not finite; when that token is asked for.
    """
    longest, vocabulary = model.max_sequence_length, model.vocab_size
    window = longest if window is None else window
    device = next(model.parameters()).device
    _check(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}", "0 or more")
    _check(1 <= window <= longest, f"window={window}", f"1 to model.max_sequence_length={longest}")
    _check(len(prompt_tokens) >= 1, "an empty prompt", "at least one token, such as the end-of-document token")
    for token in (*prompt_tokens, *(() if stop_token is None else (stop_token,))):
        _check(0 <= token < vocabulary, f"token {token}", f"0 to {vocabulary - 1}, the model's vocabulary")
    _check(len(generators) >= 1, "no generator", "one for each text")
    for generator in generators:
        fits = generator.device.type == device.type
        given = f"a generator on {generator.device} with a model on {device}"
        _check(fits, given, f'torch.Generator("{device.type}")')

    def together() -> Generator[tuple[int | None, ...]]:
        texts = [list(prompt_tokens) for _ in generators]
        ended = [False] * len(texts)
        unread, cache, was_training = window, model.new_cache(), model.training
        model.eval()
        try:
            for _ in range(max_new_tokens):
                if cache.length + unread > window:
                    unread, cache = max(1, window // 2), model.new_cache()
                # Not around the yield, where it would hold for whoever asks for the tokens. Not inference mode: what
                # FSDP gathers in it could not be trained afterwards.
                with torch.no_grad():
                    # `__call__` but for one thing: a compiled model would compile anew for every length of the cache.
                    call: Callable[..., Tensor] = model._call_impl
                    logits = call(torch.tensor([text[-unread:] for text in texts], device=device), cache)[:, -1]
                    for number, (text, of_text) in enumerate(zip(texts, logits.float(), strict=True)):
                        # a text that has ended repeats its last token, for nothing: the others are in the same batch
                        token = text[-1] if ended[number] else sampling.draw(of_text, text, generators[number])
                        text.append(token)
                        ended[number] = token == stop_token
                if all(ended):
                    break
                unread = 1
                yield tuple(None if over else text[-1] for text, over in zip(texts, ended, strict=True))
        finally:
            model.train(was_training)

    return together()


def _only(together: Generator[tuple[int | None, ...]]) -> Iterator[int]:
    """The tokens of the one text there is."""
    with closing(together):
        for (token,) in together:
            assert token is not None, "it ends with its only text"
            yield token


def _check(holds: bool, given: str, works: str) -> None:
    if not holds:
        raise ConfigurationError(f"{given} was given; use {works}.")


class TextStream:
    """Whole characters as soon as they are certain; all that was given is in the end what `Tokenizer.decode` gives.

    Args:
        stops: texts that end it, and are left out with all that follows: of several, the one that is complete first.

    >>> from diloco.data.tokenizer import ByteTokenizer
    >>> text = TextStream(ByteTokenizer(), stops=["END"])
    >>> [text.feed(byte) for byte in "né Er END.".encode()], text.stopped
    (['n', '', 'é', ' ', '', 'Er', ' ', '', '', '', ''], True)
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ConfigurationError("a text to stop at is empty.")
        self.stopped = False  # whether one of ``stops`` has come; what is fed afterwards is not looked at
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, token: int) -> str:
        """The text that is certain now, beyond what was given before."""
        return "" if self.stopped else self._take(self._decoder.decode(self._tokenizer.as_bytes(token)))

    def finish(self) -> str:
        """The rest, when no more tokens come."""
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
        keep = max((self._begun(stop) for stop in self._stops), default=0)
        certain = len(self._held) - keep
        given, self._held = self._held[:certain], self._held[certain:]
        return given

    def _begun(self, stop: str) -> int:
        """How many characters at the end of what is held may be the beginning of ``stop``."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


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
        raise DataError("There is no question to answer.")
    found = []
    for question in questions:
        tokens = answer(model, tokenizer, question.prompt(tokenizer), max_new_tokens=max_new_tokens, window=window)
        found.append(Answered(question, tokenizer.decode(list(tokens))))
    return found
