"""A causal language model of ``transformers``, behind the interface of training, evaluation and generation."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from diloco.errors import ConfigurationError
from diloco.model.language_model import LanguageModel, LossParts, TokensSeen
from diloco.model.loss import cross_entropy_with_z_loss, projected_cross_entropy

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from diloco.model.settings import ModelSettings

__all__ = ["UNLIMITED", "HuggingFaceCache", "HuggingFaceModel", "alike"]

UNLIMITED = 1 << 30  # the maximum length for a model without a position limit, such as a recurrent one
PROBED_TOKENS = 8  # length of the sequence that tests what a token sees

PROBE_TOLERANCE = 1e-4
"""Largest relative difference between logits that count as equal. Round-off is far below it; the effect of a token that
is seen is far above."""

DocumentMasks = Literal["positions", "mask"]


class HuggingFaceCache(TokensSeen):
    """The tokens seen; for architectures that use one, ``past`` is the key-value cache of transformers."""

    def __init__(self, past: DynamicCache | None) -> None:
        super().__init__()
        self.past = past


class HuggingFaceModel(LanguageModel):
    """A causal language model of ``transformers``.

    If its configuration has a load-balancing loss for experts (``router_aux_loss_coef``), that loss is included; a
    coefficient of 0 leaves it out. Call `probe` once after building, before the model is sharded among ranks.

    Args:
        z_loss: weight of the squared log-partition in the loss.
    """

    loss_calls_model = False

    def __init__(self, wrapped: PreTrainedModel, *, z_loss: float = 0.0) -> None:
        super().__init__()
        self.wrapped = wrapped  # its parameters are named ``wrapped.NAME`` here
        embedding: Any = wrapped.get_input_embeddings()
        # Packed documents have no padding. The padding token is often the end-of-document token, which must be trained.
        embedding.padding_idx = None
        self.z_loss = z_loss
        # the kind of the initial weights; None: unknown, or they come from a checkpoint
        self.weights: Literal["stored", "fresh"] | None = None
        self.base = ""  # a digest of the initial stored weights; "" if unknown
        self.adapters: ModelSettings | None = None  # the settings of its adapters; None: it has none
        config = wrapped.config
        head = _head_of(wrapped)
        self.vocab_size = int(config.vocab_size if head is None else head.shape[0])
        self.max_sequence_length = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
        self.num_layers = self.count_layers()
        accepted = inspect.signature(wrapped.forward).parameters
        self._caches = "past_key_values" in accepted
        self._takes_positions = "position_ids" in accepted
        coefficient = getattr(config, "router_aux_loss_coef", None) or 0.0
        self.balance_loss = float(coefficient) if "output_router_logits" in accepted else 0.0
        # whether the logits are just the product of hidden states and output projection, so that the loss can be
        # computed in chunks; set by `probe`
        self.projects = False
        self.whole_graphs = self.balance_loss == 0  # that loss is collected from the blocks, outside their graphs
        # how the documents of a packed row are masked from each other: by positions that restart, which most
        # architectures support, or by a mask; None: not supported, so ``documents`` are refused
        self.document_masks: DocumentMasks | None = "positions" if self._takes_positions else None

    def forward(
        self,
        tokens: Tensor,
        cache: HuggingFaceCache | None = None,
        documents: Tensor | None = None,
        *,
        with_balance: bool = False,
    ) -> Any:
        """Return what `LanguageModel.forward` does; with ``with_balance``, also the experts' load-balancing loss,
        ``()``.
        """
        start = 0 if cache is None else cache.length
        new = tokens.shape[1]
        if start + new > self.max_sequence_length:
            raise ConfigurationError(
                f"A sequence of {start + new} tokens is longer than max_position_embeddings={self.max_sequence_length} "
                f"of {type(self.wrapped).__name__}. Shorten it."
            )
        if cache is not None:
            seen = cache.extend(tokens)
            if cache.past is None:
                return self.wrapped(input_ids=seen).logits[:, -new:]
        given = self._given(tokens, documents)
        if cache is not None:
            given |= {"past_key_values": cache.past, "use_cache": True}
        if with_balance:
            given["output_router_logits"] = True
        output = self.wrapped(**given)
        return (output.logits, output.aux_loss) if with_balance else output.logits

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> LossParts:
        how, targets, head = self.loss_chunks, targets.flatten(), _head_of(self.wrapped)
        if self.projects and head is not None and how.serve(len(targets)):
            hidden = self._hidden(tokens, documents).flatten(0, 1)
            return LossParts(
                *projected_cross_entropy(
                    hidden, head, targets, self.z_loss, chunk_tokens=how.tokens, compiled=how.compiled
                )
            )
        # not `self(...)`: the hooks that gather parameters are on this method
        if self.balance_loss:
            logits, balance = self.forward(tokens, documents=documents, with_balance=True)
        else:
            logits, balance = self.forward(tokens, documents=documents), None
        loss, cross_entropy = cross_entropy_with_z_loss(logits.flatten(0, 1).float(), targets.flatten(), self.z_loss)
        return LossParts(loss if balance is None else loss + self.balance_loss * balance, cross_entropy)

    def new_cache(self) -> HuggingFaceCache:
        from transformers import DynamicCache

        return HuggingFaceCache(DynamicCache(config=self.wrapped.config) if self._caches else None)

    def flops_per_token(self, sequence_length: int | None = None) -> float:
        """Return the estimated floating-point operations of training on one token, forward and backward.

        ``6 * N + 12 * layers * width * context``, as for the native decoder. N counts the matrices that one token
        passes through: the output projection also when tied, of the experts only those chosen, and no embeddings. Width
        is that of all heads. Context is the average number of tokens that a token sees, limited by ``sliding_window``.
        """
        config = self.wrapped.config
        length = self.max_sequence_length if sequence_length is None else sequence_length
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        head_width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        window = getattr(config, "sliding_window", None) or length
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * self.num_layers
        contexts = {"full_attention": _context(length, length), "sliding_attention": _context(length, window)}
        seen = sum(contexts.get(kind, 0.0) for kind in kinds)
        return 6.0 * self._matrices_of_a_token() + 12.0 * heads * head_width * seen

    def definition(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.wrapped.config.to_json_string(use_diff=False))
        made = {"architecture": type(self.wrapped).__name__, "config": config}
        return made | {"base": self.base} if self.base else made

    def to_huggingface(self) -> PreTrainedModel:
        """Return the model itself, in evaluation mode. Adapters are merged into the weights."""
        self.eval()
        if self.adapters is not None:
            from diloco.model.adapters import merge_adapters

            merge_adapters(self)
            self.adapters = None
        return self.wrapped

    @torch.no_grad()
    def probe(self) -> None:
        """Test on a few tokens whether the model is causal, and how it masks documents from each other.

        Raises:
            ConfigurationError: a token sees those after it, or the logits are not finite.
        """
        special = {getattr(self.wrapped.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
        usable = [token for token in range(min(self.vocab_size, 64)) if token not in special] or [0]
        length = min(PROBED_TOKENS, self.max_sequence_length)
        device = next(self.parameters()).device
        tokens = torch.tensor([[usable[i % len(usable)] for i in range(length)]], dtype=torch.int64, device=device)
        was_training = self.training
        self.eval()
        try:
            logits = self(tokens)
            if not bool(logits.isfinite().all()):
                raise ConfigurationError(
                    f"{type(self.wrapped).__name__} gives logits that are not finite: its weights are damaged. Get "
                    "another copy of the weights, or use --model.arguments.weights fresh."
                )
            changed = tokens.clone()
            changed[0, -1] = tokens[0, 0]
            if not alike(self(changed)[:, :-1], logits[:, :-1]):
                raise ConfigurationError(
                    f"{type(self.wrapped).__name__} is not causal as configured: a token sees those after it. For BERT "
                    "and related models, set is_decoder = true."
                )
            self.document_masks = self._find_document_masks(tokens)
            self.projects = self._only_projects(tokens)
        finally:
            self.train(was_training)

    def _only_projects(self, tokens: Tensor) -> bool:
        """Return whether the logits are ``hidden @ projection``: no bias, cap, factor or load-balancing loss."""
        wrapped: Any = self.wrapped
        head = _head_of(wrapped)
        has_bias = getattr(wrapped.get_output_embeddings(), "bias", None) is not None
        if head is None or self.balance_loss or has_bias:
            return False
        large = 2.0**14  # a cap affects only large logits; a power of two restores the weights exactly
        head.mul_(large)
        try:
            return alike(nn.functional.linear(self._hidden(tokens, None), head), self(tokens))
        except (AttributeError, TypeError, ValueError, RuntimeError):  # a base model with another interface
            return False
        finally:
            head.mul_(1 / large)

    def _hidden(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Return the input of the output projection, ``(batch, sequence, width)``."""
        wrapped: Any = self.wrapped
        hidden: Tensor = wrapped.base_model(**self._given(tokens, documents)).last_hidden_state
        return hidden

    def _given(self, tokens: Tensor, documents: Tensor | None) -> dict[str, Any]:
        """Return the keyword arguments for the forward of ``transformers``."""
        given: dict[str, Any] = {"input_ids": tokens}
        if self._caches:
            given["use_cache"] = False
        return given if documents is None else given | self._apart(documents)

    def _find_document_masks(self, tokens: Tensor) -> DocumentMasks | None:
        """Return the first method with which the second document of a row gives the same logits as alone, or None."""
        half = tokens.shape[1] // 2
        if not self._takes_positions or half == 0:
            return None
        columns = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
        documents = (columns >= half).long().unsqueeze(0)
        alone = self(tokens[:, half:])
        methods: tuple[DocumentMasks, ...] = ("positions", "mask")
        for method in methods:
            self.document_masks = method
            try:
                together = self(tokens, documents=documents)
            except (RuntimeError, ValueError, TypeError):  # the architecture does not accept such a mask
                continue
            if alike(together[:, half:], alone):
                return method
        return None

    def _apart(self, documents: Tensor) -> dict[str, Tensor]:
        """Return the arguments that tell the model which tokens of a row belong to the same document."""
        if self.document_masks is None:
            raise ConfigurationError(
                f"{type(self.wrapped).__name__} can't mask the documents of a packed row from each other. Give each "
                "conversation its own row (--data.packing single), use --data.packing joined, or another architecture."
            )
        positions = torch.arange(documents.shape[1], dtype=torch.int64, device=documents.device).expand_as(documents)
        begins = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        restarted = positions - torch.where(begins, positions, 0).cummax(1).values
        if self.document_masks == "positions":  # transformers infers from them where a document begins
            return {"position_ids": restarted}
        same = (documents.unsqueeze(1).unsqueeze(3) == documents.unsqueeze(1).unsqueeze(2)).tril()
        mask = torch.zeros(same.shape, dtype=torch.float32, device=documents.device)
        mask.masked_fill_(~same, torch.finfo(torch.float32).min)
        return {"position_ids": restarted, "attention_mask": mask}

    def _matrices_of_a_token(self) -> float:
        """Return the number of matrix values by which one token is multiplied."""
        config = self.wrapped.config
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((int(n) for name in names if (n := getattr(config, name, None))), 1)
        chosen = int(getattr(config, "num_experts_per_tok", None) or experts)
        head = _head_of(self.wrapped)
        looked_up = {id(module.weight) for module in self.wrapped.modules() if isinstance(module, nn.Embedding)}
        total = 0.0 if head is None else float(head.numel())
        for name, weight in self.wrapped.named_parameters():
            if weight.dim() < 2 or id(weight) in looked_up or weight is head:
                continue
            total += weight.numel() * (chosen / experts if ".experts." in name else 1.0)
        return total


def _head_of(wrapped: Any) -> Tensor | None:
    """Return the output projection, ``(vocab, width)``, or None if there is none."""
    head = wrapped.get_output_embeddings()
    return None if head is None else head.weight


def _context(length: int, window: int) -> float:
    """Return the average number of tokens, itself included, that a token of a sequence sees with a sliding window.

    >>> _context(4, 4), _context(4, 2)
    (2.5, 1.75)
    """
    short = min(length, window)
    return (short * (short + 1) / 2 + (length - short) * short) / length


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two ``(..., vocab)`` logits differ only by round-off."""
    scale = torch.maximum(one.abs().max(), other.abs().max())
    return bool((one - other).abs().max() <= PROBE_TOLERANCE * scale)
