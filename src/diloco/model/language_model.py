"""What training, evaluation and generation need of a model, whoever wrote it."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from diloco.algorithm.fragments import trainable_parameters
from diloco.algorithm.layers import group_layers
from diloco.errors import ConfigurationError
from diloco.model.loss import ENDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Cache", "LanguageModel", "LossChunks", "LossParts", "TokensSeen", "document_numbers", "documents_of"]


class LossParts(NamedTuple):
    """What `LanguageModel.loss` gives: two float32 scalars, nats per token."""

    loss: Tensor  # to differentiate: mean cross-entropy plus whatever the model adds to it, such as z-loss
    cross_entropy: Tensor  # to report: the mean cross-entropy alone; it has no gradient


@dataclass(frozen=True)
class LossChunks:
    """Whether a loss is computed together with the output projection, and how; see `projected_cross_entropy`."""

    tokens: int = 0  # at most so many have logits at once. 0: all of a batch, as an array of their own.
    compiled: bool = False  # with torch.compile

    def serve(self, tokens: int) -> bool:
        """Whether a batch of ``tokens`` is computed so: when it is larger than a chunk, or compiled.

        >>> LossChunks(4096).serve(4096), LossChunks(4096).serve(4097), LossChunks(4096, compiled=True).serve(8)
        (False, True, True)
        """
        return self.tokens > 0 and (self.compiled or tokens > self.tokens)


class Cache(Protocol):
    """What a model keeps of the tokens it has seen, for decoding a few tokens at a time."""

    @property
    def length(self) -> int:
        """Tokens seen."""
        ...


class TokensSeen:
    """A cache for models without one: the tokens themselves, which every step reads anew.

    >>> seen = TokensSeen()
    >>> seen.extend(torch.tensor([[1, 2]])).tolist(), seen.extend(torch.tensor([[3]])).tolist(), seen.length
    ([[1, 2]], [[1, 2, 3]], 3)
    """

    def __init__(self) -> None:
        self._tokens: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self._tokens is None else self._tokens.shape[1]

    def extend(self, tokens: Tensor) -> Tensor:
        """All tokens, ``(batch, length + new)``, with the ``(batch, new)`` added."""
        self._tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens), 1)
        return self._tokens


class LanguageModel(nn.Module, abc.ABC):
    """A causal language model."""

    vocab_size: int  # number of logits; every token id is below it
    max_sequence_length: int  # of the longest sequence that it serves, tokens
    num_layers: int  # blocks, as fragments are made of
    # how `loss` is computed, for a model that can do it in chunks; set by who trains it
    loss_chunks: LossChunks = LossChunks()
    whole_graphs: bool = True  # whether torch.compile traces its blocks without a break
    # whether `loss` goes through ``self(tokens)``, and so through the hooks that are on it
    loss_calls_model: bool = True
    # names of the state that no checkpoint holds, because the model's source does: frozen weights beside adapters
    source_has: frozenset[str] = frozenset()

    @abc.abstractmethod
    def forward(self, tokens: Tensor, cache: Any = None, documents: Tensor | None = None) -> Tensor:
        """Logits of the token that follows each position.

        Args:
            tokens: ``(batch, sequence)`` int64.
            cache: of this model's `new_cache`: what came before ``tokens``, to which they are added. None: nothing.
            documents: ``(batch, sequence)`` int64, equal where two tokens of a row belong to one document; a token sees
                only those of its own (not with a cache). None: it sees all that came before.

        Returns:
            ``(batch, sequence, vocab_size)``, float32 or the autocast dtype.

        Raises:
            ConfigurationError: if the sequence, with what the cache holds, is longer than ``max_sequence_length``.
        """

    @abc.abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        """The training loss, in float32 under autocast too.

        Args:
            tokens: ``(batch, sequence)`` int64.
            targets: ``(batch, sequence)`` int64, the token that follows each of ``tokens``; negative: it is not
                counted. The means are over those that are, and 0 where none is.
            documents: as in `forward`.
        """

    @abc.abstractmethod
    def new_cache(self) -> Cache:
        """An empty cache, for one batch of sequences."""

    @abc.abstractmethod
    def flops_per_token(self, sequence_length: int | None = None) -> float:
        """Estimated floating-point operations of training on one token, forward and backward.

        Args:
            sequence_length: tokens per sequence; default: ``max_sequence_length``.
        """

    def definition(self) -> dict[str, Any]:
        """What its settings alone don't say of it, as JSON, so that it can be built where its source is gone.

        Given back to `diloco.model.build.build_language_model`. Empty where the settings say all.
        """
        return {}

    def to_huggingface(self) -> PreTrainedModel:
        """The model of ``transformers`` that has the same logits, in evaluation mode; parameters are shared with it.

        Raises:
            ConfigurationError: there is none, or ``transformers`` is not installed.
        """
        raise ConfigurationError(
            f"{type(self).__name__} does not say which model of transformers it equals; give it a method "
            "to_huggingface."
        )

    def count_layers(self) -> int:
        """The numbered blocks among the trainable parameters, which is what fragments are made of."""
        return len(group_layers({name: p.numel() for name, p in trainable_parameters(self).items()})[1])

    def saved_state(self) -> dict[str, Tensor]:
        """The state dict without what the model's source has; not copied."""
        return {name: value for name, value in self.state_dict().items() if name not in self.source_has}

    def load_saved_state(self, values: Mapping[str, Tensor]) -> None:
        """Take over what `saved_state` gave.

        Raises:
            RuntimeError: it is of another model.
        """
        self.load_state_dict({name: v for name, v in self.state_dict().items() if name in self.source_has} | {**values})

    def num_trained(self) -> int:
        """Trainable parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def num_parameters(self) -> int:
        """Trainable and frozen parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Which document of its row each token belongs to, counted from 0; ``(batch, sequence)`` int64 both.

    Args:
        tokens: packed documents.
        end: the token that ends each of them, and belongs to it.

    >>> import torch
    >>> document_numbers(torch.tensor([[5, 9, 6, 7, 9, 8]]), end=9)
    tensor([[0, 0, 1, 1, 1, 2]])
    """
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def documents_of(tokens: Tensor, targets: Tensor, end: int | None) -> Tensor | None:
    """`document_numbers` of ``tokens``, ``(batch, sequence)`` int64.

    Args:
        tokens: packed documents.
        targets: the token that follows each of them.
        end: the token that ends a document; `ENDS`: the targets say where one ends; None: they are not told apart.
    """
    if end is None:
        return None
    return document_numbers(targets if end == ENDS else tokens, end)
