"""Text from a trained model: one token after the other, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import ConfigurationError, NonFiniteError
from diloco.model.language_model import LanguageModel
from diloco.trained.sampling import Sampling

__all__ = ["generate", "generate_together"]

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
    """Continue ``prompt_tokens``. The model is in evaluation mode meanwhile and in its own mode afterwards.

    A token is seen together with at most the ``window - 1`` before it. When the window is full, the later half of it
    is read anew and generation goes on from there: a token costs at most two forward passes of one token on average,
    and always sees at least half a window (or all there is).

    Args:
        prompt_tokens: token ids, at least one; of a prompt longer than the window, its end is read.
        generator: of the draws, on the model's device.
        max_new_tokens: tokens to generate, at least 0.
        sampling: how they are drawn.
        stop_token: end when the model gives this token.
        window: tokens of context; default: the model's ``max_sequence_length``. A model does poorly beyond the
            sequence length it was trained with, so that length is the one to give.

    Returns:
        An iterator of the new tokens, without the prompt and without ``stop_token``; each is computed when asked for.

    Raises:
        ConfigurationError: for an argument that cannot work; at once.
        NonFiniteError: if the model gives logits that are not finite; when that token is asked for.
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
    """Continue one prompt several times, in one batch: each text is the one that `generate` gives with its generator.

    But for the round-off of the logits, which is another for another size of the batch: where two tokens are equally
    likely to the last bits, it may decide.

    Args:
        generators: one for each text; all other arguments as those of `generate`.

    Returns:
        An iterator of the next token of each text, None for one that has ended; it ends when all have.

    Raises:
        ConfigurationError: for an argument that cannot work; at once.
        NonFiniteError: as `generate`.
    """
    longest = model.max_sequence_length
    window = longest if window is None else window
    device = next(model.parameters()).device
    vocabulary = model.vocab_size
    _check(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}", "0 or more")
    _check(1 <= window <= longest, f"window={window}", f"1 to model.max_sequence_length={longest}")
    _check(len(prompt_tokens) >= 1, "an empty prompt", "at least one token, such as the end-of-document token,")
    for token in (*prompt_tokens, *(() if stop_token is None else (stop_token,))):
        _check(0 <= token < vocabulary, f"token {token}", f"0 to {vocabulary - 1}, the model's vocabulary,")
    _check(len(generators) >= 1, "no generator", "one for each text")
    for generator in generators:
        _check(
            generator.device.type == device.type,
            f"a generator on {generator.device} with a model on {device}",
            f'torch.Generator("{device.type}")',
        )
    texts = [_Text(list(prompt_tokens), generator) for generator in generators]
    return _together(model, texts, max_new_tokens, sampling, stop_token, window)


@dataclass
class _Text:
    """One of those that are continued together, with its prompt; of one length all of them."""

    tokens: list[int]
    generator: torch.Generator
    ended: bool = False


def _together(
    model: LanguageModel,
    texts: Sequence[_Text],
    max_new_tokens: int,
    sampling: Sampling,
    stop_token: int | None,
    window: int,
) -> Generator[tuple[int | None, ...]]:
    device = next(model.parameters()).device
    unread = window
    cache = model.new_cache()
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if cache.length + unread > window:
                unread = max(1, window // 2)
                cache = model.new_cache()
            # Not around the yield, where it would hold for whoever asks for the tokens. Not inference mode: what FSDP
            # gathers in it could not be trained afterwards.
            with torch.no_grad():
                # `__call__` but for one thing: a compiled model would compile anew for every length of the cache.
                call: Callable[..., Tensor] = model._call_impl
                logits = call(torch.tensor([text.tokens[-unread:] for text in texts], device=device), cache)[:, -1]
                for text, of_text in zip(texts, logits.float(), strict=True):
                    # One that has ended goes on with its last token, for nothing: the others are in the same batch.
                    token = text.tokens[-1] if text.ended else _sample(of_text, text, sampling)
                    text.tokens.append(token)
                    text.ended = token == stop_token
            if all(text.ended for text in texts):
                break
            unread = 1
            yield tuple(None if text.ended else text.tokens[-1] for text in texts)
    finally:
        model.train(was_training)


def _only(together: Generator[tuple[int | None, ...]]) -> Iterator[int]:
    """The tokens of the one text there is."""
    with closing(together):
        for (token,) in together:
            assert token is not None, "it ends with its only text"
            yield token


def _sample(logits: Tensor, text: _Text, sampling: Sampling) -> int:
    """The next token of ``text``, from ``(vocab,)`` float32 logits."""
    if not bool(logits.isfinite().all()):
        raise NonFiniteError(
            "the model gave logits that are not finite; its parameters are damaged or its training diverged. "
            "No further token was generated."
        )
    penalty = sampling.repetition_penalty
    if penalty != 1:
        occurred = torch.tensor(sorted(set(text.tokens)), device=logits.device)
        theirs = logits[occurred]
        penalised = theirs.where(theirs < 0, theirs / penalty)
        logits = logits.scatter(0, occurred, penalised.where(theirs >= 0, theirs * penalty))
    if sampling.temperature == 0:
        return int(logits.argmax())
    candidates, tokens = logits.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        candidates, tokens = candidates[: sampling.top_k], tokens[: sampling.top_k]
    # Relative to the largest first, so that a tiny temperature gives 0 and -inf instead of inf - inf.
    probabilities = ((candidates - candidates[0]) / sampling.temperature).softmax(0)
    if sampling.top_p is not None:
        # A token stays if those before it have not reached top_p; the first always does.
        probabilities = probabilities.where(probabilities.cumsum(0) - probabilities < sampling.top_p, 0)
    if sampling.min_p is not None:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities[0], 0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=text.generator)])


def _check(holds: bool, given: str, works: str) -> None:
    if not holds:
        raise ConfigurationError(f"{given} was given; {works} would work. Nothing was generated.")
