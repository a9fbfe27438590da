"""Generate text with a trained model, token by token, with a cache of keys and values."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from diloco.algorithm import check_ranges, check_whole
from diloco.data import Tokenizer
from diloco.errors import ConfigurationError, NonFiniteError
from diloco.model import LanguageModel

__all__ = ["Sampling", "generate", "text_of"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from the model's logits.

    Raises:
        ConfigurationError: a value is out of range.
    """

    temperature: Annotated[float, Meta(ge=0)] = 0.8  # divides the logits; 0 always takes the likeliest token
    top_k: Annotated[int | None, Meta(ge=1)] = 50  # draw only from this many likeliest tokens; None: from all
    # draw only from the smallest set of likeliest tokens, after ``top_k``, of at least this probability; None: from all
    top_p: Annotated[float | None, Meta(gt=0, le=1)] = None

    def __post_init__(self) -> None:
        check_ranges(self)

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return the next token.

        Args:
            logits: ``(vocabulary,)`` float32.
            generator: for the draws, on the same device.

        Raises:
            NonFiniteError: the logits are not finite.
        """
        if not bool(logits.isfinite().all()):
            raise NonFiniteError(
                "The model returned logits that are not finite: its parameters are damaged or its training diverged."
            )
        if self.temperature == 0:
            return int(logits.argmax())
        # Only what may be among the top_k is sorted; top_p alone needs all, as any number of tokens may have its mass.
        count = min(self.top_k or len(logits), len(logits))
        chosen = (logits >= logits.topk(count).values[-1]).nonzero().flatten()  # more than that many if some are equal
        candidates, order = logits[chosen].sort(descending=True, stable=True)
        candidates, tokens = candidates[:count], chosen[order[:count]]
        # Subtracting the largest first makes a tiny temperature give 0 and -inf instead of inf - inf.
        probabilities = ((candidates - candidates[0]) / self.temperature).softmax(0)
        if self.top_p is not None:
            # A token stays if those before it have not reached top_p; the first always stays.
            probabilities = probabilities.where(probabilities.cumsum(0) - probabilities < self.top_p, 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


DEFAULT = Sampling()


def generate(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    generator: torch.Generator,
    *,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    stop_tokens: Collection[int] = (),
    window: int | None = None,
    agreed: Callable[[int], int] = int,
) -> Iterator[int]:
    """Continue ``prompt_tokens``. The model, on any device, is in evaluation mode meanwhile.

    A token sees at most the ``window - 1`` tokens before it. When the window is full, its second half is processed
    again, and generation continues from there. So a token costs at most two forward passes of one token on average, and
    always sees at least half a window (or all there is).

    Args:
        prompt_tokens: token ids, at least one; if the prompt is longer than the window, only its end is used.
        generator: a random generator on the model's device.
        stop_tokens: end when the model generates one of these tokens, which is not returned.
        window: tokens of context; default: the model's ``max_sequence_length``.
        agreed: returns the token on which all ranks that share the model agree, from the one that this rank has drawn.

    Raises:
        ConfigurationError: an argument is out of range; raised at once.
        NonFiniteError: the logits are not finite; raised when that token is requested.
    """
    longest, vocabulary = model.max_sequence_length, model.vocab_size
    window = check_whole("window", longest if window is None else window, 1, longest)
    check_whole("max_new_tokens", max_new_tokens, 0)
    device = next(model.parameters()).device
    foreign = next((token for token in (*prompt_tokens, *stop_tokens) if not 0 <= token < vocabulary), None)
    for holds, message in (
        (len(prompt_tokens) >= 1, "The prompt is empty. Give at least one token, such as the end-of-document token"),
        (foreign is None, f"The token {foreign} is not in the model's vocabulary, 0 to {vocabulary - 1}"),
        (generator.device.type == device.type, f"The generator is on {generator.device}, but the model is on {device}"),
    ):
        if not holds:
            raise ConfigurationError(f"{message}.")

    def tokens() -> Iterator[int]:
        text, was_training = list(prompt_tokens), model.training
        unread, seen, cache = window, 0, model.new_cache()
        model.eval()
        try:
            for _ in range(max_new_tokens):
                if seen + unread > window:
                    unread, seen, cache = max(1, window // 2), 0, model.new_cache()
                # Not around the yield, where it would also apply to the consumer's code. Not inference mode: parameters
                # that FSDP gathers in it could not be trained afterwards.
                with torch.no_grad(), _uncompiled():
                    inputs = torch.tensor([text[-unread:]], dtype=torch.int64, device=device)
                    token = agreed(sampling.draw(model(inputs, cache)[0, -1].float(), generator))
                if token in stop_tokens:
                    break
                text.append(token)
                if cache is not None:  # else all of the window is processed again
                    unread, seen = 1, seen + inputs.shape[1]
                yield token
        finally:
            model.train(was_training)

    return tokens()


def _uncompiled() -> AbstractContextManager[None]:
    """Run what is compiled as it is, since it would be compiled again for every length of the cache."""
    loaded = "torch._dynamo" in sys.modules  # importing it takes long, and without it nothing is compiled
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def text_of(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text that is certain after each token, in whole characters, and then the rest.

    >>> from diloco.data import ByteTokenizer
    >>> list(text_of("né".encode(), ByteTokenizer()))
    ['n', '', 'é', '']
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield from (decoder.decode(tokenizer.as_bytes(token)) for token in tokens)
    yield decoder.decode(b"", final=True)
