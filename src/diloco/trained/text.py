"""What a trained model does with text: its loss on held-out text, and a continuation of a prompt, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn

from diloco.algorithm import check_ranges, check_whole
from diloco.data import PackedRows, PackedTokens, Tokenizer, heldout_batches, heldout_windows
from diloco.devices import Precision, to_device, uncompiled
from diloco.errors import ConfigurationError, DataError, NonFiniteError
from diloco.model import ENDS, NOT_COUNTED, LanguageModel, documents_of
from diloco.units import perplexity

LOGITS_BYTES = 1 << 30  # limit for the float32 logits of one forward pass, unless one sequence needs more


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts held-out text."""

    loss: float  # mean cross-entropy in nats per token, end-of-document tokens included
    bits_per_byte: float  # the same cross-entropy in bits per byte of text, comparable between tokenisers
    tokens: int  # number of predicted tokens
    num_bytes: int  # number of UTF-8 bytes of the documents that they stand for

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, or infinity if that overflows."""
        return perplexity(self.loss)

    @property
    def bits_per_token(self) -> float:
        """``loss`` in bits."""
        return self.loss / math.log(2)


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tokens: PackedTokens | PackedRows,
    *,
    sequence_length: int,
    batch_size: int,
    sequences: int = 0,
    document_masks: bool = False,
    precision: Precision = "float32",
    progress: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Evaluate ``model`` on held-out ``tokens``; afterwards its mode is restored.

    Args:
        batch_size: sequences per forward pass; fewer if their logits would take more than `LOGITS_BYTES`.
        sequences: how many sequences to use, always the same ones, spread evenly; 0: all.
        document_masks: mask the documents of a sequence from each other.
        precision: the autocast type of the forward pass, as in training.
        progress: called after each batch with the number of tokens predicted so far.

    Raises:
        DataError: there is nothing to predict.
    """
    fitting = LOGITS_BYTES // (4 * sequence_length * model.vocab_size)
    end = tokenizer.eos_id if document_masks else None
    if tokens.marks_ends:
        end = ENDS
    device, was_training = next(model.parameters()).device, model.training
    nats, count, dtype = 0.0, 0, getattr(torch, precision)
    num_bytes = tokens.target_bytes(*heldout_windows(tokens, sequence_length, sequences))
    if end is not None:
        model.keep_documents_apart()
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=precision != "float32"):
            for inputs, targets in heldout_batches(
                tokens, sequence_length, max(1, min(batch_size, fitting)), sequences
            ):
                rows, following = to_device(inputs, device), to_device(targets, device)
                logits = model(rows, documents=documents_of(rows, following, end)).flatten(0, 1).float()
                following = torch.where(following < 0, NOT_COUNTED, following).flatten()
                loss = nn.functional.cross_entropy(logits, following, ignore_index=NOT_COUNTED, reduction="sum")
                nats += float(loss)
                count += int((targets >= 0).sum())
                progress(count)
    finally:
        model.train(was_training)
    if not count:
        raise DataError("There is no token to predict in the text.")
    bits_per_byte = nats / math.log(2) / num_bytes if num_bytes else math.nan
    return Evaluation(nats / count, bits_per_byte, count, num_bytes)


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
    if not prompt_tokens:
        raise ConfigurationError("The prompt is empty. Give at least one token, such as the end-of-document token.")
    if foreign := [token for token in (*prompt_tokens, *stop_tokens) if not 0 <= token < vocabulary]:
        raise ConfigurationError(f"The token {foreign[0]} is not in the model's vocabulary, 0 to {vocabulary - 1}.")

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
                # Uncompiled, as it would be compiled again for every length of the cache.
                with torch.no_grad(), uncompiled():
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


_CONTEXT = 64  # tokens that are decoded again with each new one


def text_of(tokens: Iterable[int], tokenizer: Tokenizer, prompt_tokens: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text that is certain after each token, in whole characters, and then the rest.

    Together the pieces are what the tokens add to the text of ``prompt_tokens``, which may be a space at its end.

    >>> from diloco.data import ByteTokenizer
    >>> list(text_of("né".encode(), ByteTokenizer()))
    ['n', '', 'é', '']
    """
    context = _recent(list(prompt_tokens), tokenizer)
    shown = len(tokenizer.decode(context))
    for token in tokens:
        context.append(token)
        certain = tokenizer.decode_settled(context)
        yield certain[shown:]
        shown = max(shown, len(certain))
        if len(context) > 2 * _CONTEXT and shown == len(certain):
            context = _recent(context, tokenizer)
            shown = len(tokenizer.decode_settled(context))
    yield tokenizer.decode(context)[shown:]


def _recent(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the last tokens, or all of them if they end within a character."""
    is_whole = tokenizer.decode_settled(tokens) == tokenizer.decode(tokens)
    return tokens[-_CONTEXT:] if is_whole else tokens


def without_end(pieces: Iterable[str], end: str) -> Iterator[str]:
    """Yield the pieces of a text without ``end`` at its end; what may be the beginning of it is kept back.

    >>> list(without_end(["a", "\\n", "b", "\\n"], "\\n"))
    ['a', '', '\\nb', '']
    """
    kept = ""
    for piece in pieces:
        text = kept + piece
        kept = next(end[:size] for size in range(min(len(text), len(end)), -1, -1) if text.endswith(end[:size]))
        yield text[: len(text) - len(kept)]
    if kept != end:
        yield kept
