"""Text from a trained model: one token after the other, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.errors import ConfigurationError, NonFiniteError
from diloco.model.language_model import LanguageModel

__all__ = ["generate", "stream"]


def generate(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    *,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_token: int | None = None,
    window: int | None = None,
) -> list[int]:
    """Continue ``prompt_tokens``; all at once what `stream` gives one by one. See there."""
    return list(
        stream(
            model,
            prompt_tokens,
            max_new_tokens=max_new_tokens,
            generator=generator,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop_token=stop_token,
            window=window,
        )
    )


def stream(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    *,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_token: int | None = None,
    window: int | None = None,
) -> Iterator[int]:
    """Continue ``prompt_tokens``. The model is in evaluation mode meanwhile and in its own mode afterwards.

    A token is seen together with at most the ``window - 1`` before it. When the window is full, the later half of it
    is read anew and generation goes on from there: a token costs at most two forward passes of one token on average,
    and always sees at least half a window (or all there is).

    Args:
        prompt_tokens: token ids, at least one; of a prompt longer than the window, its end is read.
        max_new_tokens: tokens to generate, at least 0.
        generator: of the samples, on the model's device.
        temperature: logits are divided by it; 0 takes the likeliest token always.
        top_k: sample among the k likeliest tokens; None: among all.
        top_p: sample among the likeliest tokens that together reach this probability, after ``top_k``, the one that
            reaches it included; None: among all.
        min_p: leave out tokens less likely than this share of the likeliest one's probability; None: none.
        repetition_penalty: positive logits of tokens that have occurred, in the prompt too, are divided by it, others
            multiplied (CTRL, 1909.05858); 1: no penalty.
        stop_token: end when the model gives this token.
        window: tokens of context; default: the model's ``max_sequence_length``. A model does poorly beyond the
            sequence length it was trained with, so that length is the one to give.

    Returns:
        An iterator of the new tokens, without the prompt and without ``stop_token``; each is computed when asked for.

    Raises:
        ConfigurationError: for an argument that cannot work; at once.
        NonFiniteError: if the model gives logits that are not finite; when that token is asked for.
    """
    longest = model.max_sequence_length
    window = longest if window is None else window
    device = next(model.parameters()).device
    vocabulary = model.vocab_size
    _check(max_new_tokens >= 0, f"max_new_tokens={max_new_tokens}", "0 or more")
    _check(0 <= temperature < float("inf"), f"temperature={temperature}", "0 (greedy) or a positive number")
    _check(top_k is None or top_k >= 1, f"top_k={top_k}", "1 or more, or None")
    _check(top_p is None or 0 < top_p <= 1, f"top_p={top_p}", "a number above 0 and up to 1, or None")
    _check(min_p is None or 0 < min_p <= 1, f"min_p={min_p}", "a number above 0 and up to 1, or None")
    _check(0 < repetition_penalty < float("inf"), f"repetition_penalty={repetition_penalty}", "a positive number")
    _check(1 <= window <= longest, f"window={window}", f"1 to model.max_sequence_length={longest}")
    _check(len(prompt_tokens) >= 1, "an empty prompt", "at least one token, such as the end-of-document token,")
    for token in (*prompt_tokens, *(() if stop_token is None else (stop_token,))):
        _check(0 <= token < vocabulary, f"token {token}", f"0 to {vocabulary - 1}, the model's vocabulary,")
    _check(
        generator.device.type == device.type,
        f"a generator on {generator.device} with a model on {device}",
        f'torch.Generator("{device.type}")',
    )

    choice = _Choice(generator, temperature, top_k, top_p, min_p, repetition_penalty)
    return _stream(model, list(prompt_tokens), max_new_tokens, choice, stop_token, window)


class _Choice(NamedTuple):
    """How a token is drawn; see `stream`."""

    generator: torch.Generator
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float


def _stream(
    model: LanguageModel, tokens: list[int], max_new_tokens: int, choice: _Choice, stop_token: int | None, window: int
) -> Iterator[int]:
    device = next(model.parameters()).device
    unread = tokens[-window:]
    cache = model.new_cache()
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            if cache.length + len(unread) > window:
                unread = tokens[-max(1, window // 2) :]
                cache = model.new_cache()
            # Not around the yield, where it would hold for whoever asks for the tokens. Not inference mode: what FSDP
            # gathers in it could not be trained afterwards.
            with torch.no_grad():
                # `__call__` but for one thing: a compiled model would compile anew for every length of the cache.
                call: Callable[..., Tensor] = model._call_impl
                logits = call(torch.tensor([unread], device=device), cache)[0, -1].float()
                token = _sample(logits, tokens, choice)
            if token == stop_token:
                break
            tokens.append(token)
            unread = [token]
            yield token
    finally:
        model.train(was_training)


def _sample(logits: Tensor, before: Sequence[int], choice: _Choice) -> int:
    """One token from ``(vocab,)`` float32 logits, after the tokens ``before``."""
    generator, temperature, top_k, top_p, min_p, repetition_penalty = choice
    if not bool(logits.isfinite().all()):
        raise NonFiniteError(
            "the model gave logits that are not finite; its parameters are damaged or its training diverged. "
            "No further token was generated."
        )
    if repetition_penalty != 1:
        occurred = torch.tensor(sorted(set(before)), device=logits.device)
        theirs = logits[occurred]
        penalised = theirs.where(theirs < 0, theirs / repetition_penalty)
        logits = logits.scatter(0, occurred, penalised.where(theirs >= 0, theirs * repetition_penalty))
    if temperature == 0:
        return int(logits.argmax())
    candidates, tokens = logits.sort(descending=True, stable=True)
    if top_k is not None:
        candidates, tokens = candidates[:top_k], tokens[:top_k]
    # Relative to the largest first, so that a tiny temperature gives 0 and -inf instead of inf - inf.
    probabilities = ((candidates - candidates[0]) / temperature).softmax(0)
    if top_p is not None:
        # A token stays if those before it have not reached top_p; the first always does.
        probabilities = probabilities.where(probabilities.cumsum(0) - probabilities < top_p, 0)
    if min_p is not None:
        probabilities = probabilities.where(probabilities >= min_p * probabilities[0], 0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def _check(holds: bool, given: str, works: str) -> None:
    if not holds:
        raise ConfigurationError(f"{given} was given; {works} would work. Nothing was generated.")
