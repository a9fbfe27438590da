"""The interface of a language model that training, evaluation and generation use, and how one is built."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from diloco.algorithm import group_layers, model_state, trainable_parameters, unfit_memory
from diloco.errors import ConfigurationError
from diloco.model.documents import leak_between_documents
from diloco.model.loss import ENDS, cross_entropy_with_z_loss, projected_cross_entropy
from diloco.model.settings import ModelSettings
from diloco.plugins import call, takes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from diloco.transport import ReplicaGroup


class LossParts(NamedTuple):
    """The result of `LanguageModel.loss`: two float32 scalars in nats per token."""

    loss: Tensor  # the value to differentiate: mean cross-entropy plus what the model adds, such as z-loss
    cross_entropy: Tensor  # the value to report: the mean cross-entropy alone; it has no gradient


class LanguageModel(nn.Module):
    """A causal language model: `forward`, and what has a default here.

    A subclass sets ``vocab_size`` and ``max_sequence_length``. A loss in chunks needs `hidden` and `projection`.
    """

    vocab_size: int  # number of logits; every token id is below it
    max_sequence_length: int  # the longest supported sequence, in tokens
    num_layers: int  # the number of blocks, from which fragments are made
    z_loss: float = 0.0  # weight of the squared log-partition in the loss
    attention_width: int = 0  # of all heads, summed over the layers; 0: unknown
    expert_share: float = 1.0  # of a layer's experts that one token passes through
    # the most tokens whose logits exist at once in a `loss` that is computed in chunks together with the output
    # projection, where the model supports that; 0: all. Training sets it
    loss_chunk_tokens: int = 0
    compiled_loss: bool = False  # compute it in chunks whatever the batch, by compiled code
    whole_graphs: bool = False  # whether it is known that torch.compile traces its blocks without a break
    # the ways in which `forward` may mask documents, which `keep_documents_apart` tries in this order
    maskings: tuple[str, ...] = ("own",)
    masking = "own"  # the way that it takes
    attends_in_half = False  # whether its attention takes no float32
    documents_apart = False  # whether it has been checked
    # whether `loss` calls ``self(tokens)``, and so runs its hooks
    loss_calls_model: bool = True
    # names of the state that checkpoints leave out because the model's source has it: frozen weights next to adapters
    source_has: frozenset[str] = frozenset()

    def forward(self, tokens: Tensor, cache: Any = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits of the token that follows each position.

        Args:
            tokens: ``(batch, sequence)`` int64.
            cache: made by `new_cache`. It holds what came before ``tokens``, and they are added to it. None: nothing
                came before.
            documents: ``(batch, sequence)`` int64, equal where two tokens of a row belong to one document; a token sees
                only those of its own document (not with a cache). None: it sees all tokens before it.

        Returns:
            ``(batch, sequence, vocab_size)``, float32 or the autocast dtype.

        Raises:
            ConfigurationError: the sequence, with what the cache holds, is longer than ``max_sequence_length``.
        """
        raise NotImplementedError

    def hidden(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Return the input of the output projection, ``(batch, sequence, width)``."""
        raise NotImplementedError

    @property
    def projection(self) -> Tensor | None:
        """The output projection, ``(vocab, width)``; None if the logits are not just its product with `hidden`."""
        return None

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        """Return the training loss, in float32 also under autocast; see `cross_entropy_with_z_loss`.

        Args:
            tokens: ``(batch, sequence)`` int64.
            targets: ``(batch, sequence)`` int64, the token that follows each of ``tokens``; negative targets are not
                counted. The means are over the counted targets, and 0 if there are none.
            documents: as in `forward`.
        """
        most, targets, projection = self.loss_chunk_tokens, targets.flatten(), self.projection
        if projection is not None and most and (self.compiled_loss or len(targets) > most):
            hidden, compiled = self.hidden(tokens, documents).flatten(0, 1), self.compiled_loss
            return LossParts(
                *projected_cross_entropy(hidden, projection, targets, self.z_loss, chunk_tokens=most, compiled=compiled)
            )
        call = self if self.loss_calls_model else self.forward
        return self.loss_of_logits(call(tokens, documents=documents), targets)

    def loss_of_logits(self, logits: Tensor, targets: Tensor) -> LossParts:
        """Return the loss of ``(batch, sequence, vocab)`` logits; see `loss`."""
        return LossParts(*cross_entropy_with_z_loss(logits.flatten(0, 1).float(), targets.flatten(), self.z_loss))

    def keep_documents_apart(self) -> None:
        """Check once, on a few tokens, that the documents of a packed row can't see each other; `forward` masks them.

        Call it on all ranks of a replica, when the model has its values.

        Raises:
            ConfigurationError: they can; the message says what would work.
        """
        if self.documents_apart:
            return
        why = ""
        for masking in self.maskings:
            self.masking = masking
            try:
                why = leak_between_documents(self)
            except (ConfigurationError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # any of the model's code
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if not why:
                self.documents_apart = True
                return
        raise ConfigurationError(
            f"{type(getattr(self, 'wrapped', self)).__name__} can't mask the documents of a packed row from each other "
            f"({why}). Give each conversation its own row (--data.packing single), use --data.packing joined, or "
            "another architecture."
        )

    def new_cache(self) -> Any:
        """Return an empty cache for one batch of sequences; None if the model has none."""
        return None

    def flops_per_token(self, sequence_length: int | None = None) -> float:
        """Return the estimated floating-point operations of training on one token, forward and backward.

        Each value of a matrix takes two operations forward, two for its own gradient if it is trained, and two for the
        gradient of its input if a trained parameter comes before it, in the order of the model; experts count by
        `expert_share`, the output projection also when it is tied, embeddings not at all. Attention takes
        ``12 * attention_width`` for each token that one sees, on average half a sequence (PaLM's appendix B counts all
        of them), and 4 in layers that no gradient reaches. So without frozen parameters they are 6 per value. Left out
        are the embedding lookup, norms, positions, softmax, activation functions, loss and optimizer.

        Args:
            sequence_length: tokens per sequence; default: ``max_sequence_length``.
        """
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        # not the number of values in the weight, which are fewer if it is quantised
        products = {
            id(module.weight): module.in_features * module.out_features
            for module in self.modules()
            if isinstance(module, nn.Linear)
        }
        parameters = dict(self.named_parameters())
        positions = {name: position for position, name in enumerate(parameters)}
        first = min((positions[name] for name, p in parameters.items() if p.requires_grad), default=len(parameters))
        operations = 0.0
        for name, parameter in parameters.items():
            if parameter.dim() < 2:
                continue
            position = positions[name]
            if id(parameter) in tables:
                if id(parameter) not in products and parameter is not self.projection:
                    continue
                position = len(parameters) - 1  # a tied output projection comes last
            share = self.expert_share if ".experts." in name else 1.0
            per_value = 2 + (2 if parameter.requires_grad else 0) + (2 if position > first else 0)
            operations += per_value * share * products.get(id(parameter), parameter.numel())
        _, layers = group_layers({name: parameter.numel() for name, parameter in parameters.items()})
        reached = sum(max(positions[name] for name in layer) >= first for layer in layers) / max(1, len(layers))
        length = self.max_sequence_length if sequence_length is None else sequence_length
        return operations + (4.0 + 8.0 * reached) * self.attention_width * (length + 1) / 2

    def definition(self) -> dict[str, Any]:
        """Return, as JSON, what its settings do not say about the model: an argument of `build_language_model`, which
        then needs no source.
        """
        return {}

    def configuration(self) -> dict[str, Any]:
        """Return, as JSON, what decides beside the weights which function the model is; {}: its settings say it."""
        return {}

    def to_huggingface(self) -> PreTrainedModel:
        """Return the model of ``transformers`` with the same logits and shared parameters, in evaluation mode.

        Raises:
            ConfigurationError: there is no such model, or ``transformers`` is not installed.
        """
        raise ConfigurationError(
            f"{type(self).__name__} does not define to_huggingface, so the model of transformers that it equals is "
            "unknown. Implement that method."
        )

    def fill(self, device: torch.device, *, seed: int, group: ReplicaGroup) -> None:
        """Give a model that was built on ``meta`` memory and its values. Call it on all ranks of ``group``.

        Of a model that is sharded over ranks, each fills its own part, and holds only one whole tensor at a time; if
        its values can't be made one by one, the first rank builds it whole on the host.
        """
        raise NotImplementedError

    def count_layers(self) -> int:
        """Return the number of numbered blocks among the trainable parameters, from which fragments are made."""
        return len(group_layers({name: p.numel() for name, p in trainable_parameters(self).items()})[1])

    def saved_state(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers without what the model's source has; they are not copied."""
        return {name: value for name, value in model_state(self).items() if name not in self.source_has}

    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def document_numbers(tokens: Tensor, end: int) -> Tensor:
    """Return the number of the document in its row that each token belongs to, from 0; ``(batch, sequence)`` int64.

    ``tokens`` are packed documents, ``(batch, sequence)`` int64, each with the token ``end`` as its last.

    >>> document_numbers(torch.tensor([[5, 9, 6, 7, 9, 8]]), end=9)
    tensor([[0, 0, 1, 1, 1, 2]])
    """
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def documents_of(tokens: Tensor, targets: Tensor, end: int | None) -> Tensor | None:
    """Return `document_numbers` of ``tokens``, whose next ones are ``targets``, both ``(batch, sequence)`` int64.

    ``end`` ends a document. `ENDS`: the targets mark the ends. None: documents are not distinguished.
    """
    if end is None:
        return None
    return document_numbers(targets if end == ENDS else tokens, end)


class ForeignModel(LanguageModel):
    """A module whose ``forward(tokens)`` returns logits, adapted to the interface of a language model.

    Args:
        wrapped: takes ``(batch, sequence)`` int64 and returns ``(batch, sequence, vocab)``, or an object that has it as
            ``.logits``. Its forward may also take ``documents``, as `LanguageModel.forward` describes them.
        vocab_size: size of the last dimension of the logits.
        max_sequence_length: the longest supported sequence, in tokens.
        z_loss: weight of the squared log-partition in the loss.
    """

    def __init__(self, wrapped: nn.Module, *, vocab_size: int, max_sequence_length: int, z_loss: float = 0.0) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.vocab_size, self.max_sequence_length, self.z_loss = vocab_size, max_sequence_length, z_loss
        self.num_layers = self.count_layers()

    def forward(self, tokens: Tensor, cache: Any = None, documents: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > self.max_sequence_length:
            raise ConfigurationError(
                f"A sequence of {tokens.shape[1]} tokens is longer than max_sequence_length="
                f"{self.max_sequence_length}. Shorten it, or increase model.arguments.max_sequence_length."
            )
        name, arguments = type(self.wrapped).__name__, {} if documents is None else {"documents": documents}
        if arguments and not takes(self.wrapped.forward, "documents"):
            raise ConfigurationError(
                f"{name}.forward can't mask the documents of a packed row from each other, because it has no argument "
                "`documents`. Add one, or turn off document masks."
            )
        output = self.wrapped(tokens, **arguments)
        logits: Any = getattr(output, "logits", output)
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if shape != (*tokens.shape, self.vocab_size):
            raise ConfigurationError(
                f"{name} returned {shape}, not logits of shape (batch, sequence, vocab) = "
                f"{(*tokens.shape, self.vocab_size)}."
            )
        return logits  # type: ignore[no-any-return]  # a tensor, as checked above


def build_language_model(
    settings: ModelSettings,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    definition: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Build the model that ``settings`` describe. Fresh weights depend only on them and ``seed``, to the bit.

    No global generator advances. A model of ``transformers`` has float32 parameters, whatever its files have. On
    ``device="meta"`` it takes no memory, and no weights are read or drawn. A ``definition``, which
    `LanguageModel.definition` returned when a checkpoint was made, replaces the source, which may no longer exist.

    Raises:
        ConfigurationError: there is no such model, or it can't be trained.

    >>> build_language_model(ModelSettings(arguments={"vocab_size": 257}), seed=0, device="meta").num_parameters()
    1115520
    """
    on_meta = torch.device(device).type == "meta"
    if settings.kind == "native":
        from diloco.model.transformer import build_model

        return build_model(settings.decoder, seed=seed, device=device)
    if settings.kind == "hf":
        from diloco.model.huggingface import build_huggingface

        with _drawing_from(seed):
            model = build_huggingface(settings, on_meta=on_meta, definition=definition)
        if settings.lora_rank:
            from diloco.model.adapters import add_adapters

            with _drawing_from(seed):  # reseeded, so that the number of draws during loading does not matter
                add_adapters(model)
        return model if on_meta else model.to(device)
    with _drawing_from(seed):
        if on_meta:
            # Code that reads its own values can't run on meta; any other error is raised again below.
            with suppress(ConfigurationError), torch.device("meta"):
                return _build_foreign(settings)
        return _build_foreign(settings).to(device)


def _build_foreign(settings: ModelSettings) -> LanguageModel:
    """Call the function that ``settings.source`` names, with those of these keyword arguments that it takes:

    - ``vocab_size``: int, larger than every id: ``model.arguments.vocab_size``, or that of the tokeniser;
    - ``max_sequence_length``: int, ``model.arguments.max_sequence_length``;
    - everything else in ``model.arguments`` but ``z_loss``, which it must take.

    It returns a `LanguageModel`, or another module, which is wrapped in a `ForeignModel`. The attributes ``vocab_size``
    and ``max_sequence_length`` of such a module take precedence over the arguments.
    """
    source, arguments = settings.source or "", dict(settings.arguments)
    vocab_size, length = arguments.pop("vocab_size", None), arguments.pop("max_sequence_length", 1024)
    z_loss = arguments.pop("z_loss", 0.0)
    offered = {"vocab_size": vocab_size, "max_sequence_length": length}
    model = call("model.source", source, kind=nn.Module, arguments=arguments, offered=offered)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and (why := unfit_memory(parameter.detach())):
            raise ConfigurationError(
                f"{name!r} of {source} {why}, so no checkpoint can hold it. Keep it as a plain, dense tensor, or not "
                "among the parameters."
            )
    if isinstance(model, LanguageModel):
        return model
    vocab_size = getattr(model, "vocab_size", vocab_size)
    if not isinstance(vocab_size, int):
        raise ConfigurationError(
            f"The vocabulary size of the model that {source} returned is unknown. Give the model an attribute "
            "vocab_size, or set model.arguments.vocab_size."
        )
    longest = int(getattr(model, "max_sequence_length", length))
    return ForeignModel(model, vocab_size=vocab_size, max_sequence_length=longest, z_loss=z_loss)


def check_vocabulary(model: LanguageModel, tokens: int) -> None:
    """Raise `ConfigurationError` unless the ``tokens`` ids of a tokeniser fit in the model's vocabulary."""
    if tokens > model.vocab_size:
        raise ConfigurationError(
            f"The tokeniser has {tokens} tokens, but the model has a vocabulary of {model.vocab_size}. Use a smaller "
            f"tokeniser (--tokenizer), such as the model's own, or use --model.arguments.vocab-size "
            f"{tokens}; a model of transformers then also needs --model.arguments.weights fresh."
        )


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of Python, NumPy and torch inside the context, and restore them afterwards.

    Third-party models draw from them. Models are built on the CPU, for the same bits on every device.
    """
    words = [int(word) for word in np.random.SeedSequence(seed).generate_state(3, np.uint64)]
    python, numpy, state = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        random.seed(words[0])
        np.random.seed(words[1] % 2**32)
        torch.default_generator.manual_seed(words[2])
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(state)
