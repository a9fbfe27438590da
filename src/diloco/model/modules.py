"""The modules of the native decoder: attention with its masks and cache, feed-forward, norm, and rotary positions.

Matrices are laid out as in Llama: the first half of a head is rotated against its second half. Nothing here draws
initial values; `diloco.model.transformer.Transformer.initialise` draws all of them, in one order.

Without documents, the mask is the causal one, for which `scaled_dot_product_attention` has its fastest kernel. A mask
given as an array would rule out that kernel. So on CUDA, FlexAttention masks documents from each other, and skips the
blocks that no token sees; on other devices, a boolean array does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.model.loss import product_dtype
from diloco.model.settings import ModelSettings

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "Embedding",
    "KeyValueCache",
    "Layer",
    "Linear",
    "RMSNorm",
    "attend",
    "block_mask",
    "boolean_mask",
    "rotary_table",
    "within_documents",
]


def within_documents(documents: Tensor) -> Tensor | BlockMask:
    """Return the mask, for `attend`, with which each token sees those before it in its own document.

    Args:
        documents: ``(batch, sequence)`` int64, equal where two tokens of a row belong to one document.
    """
    return block_mask(documents) if documents.is_cuda else boolean_mask(documents)


def boolean_mask(documents: Tensor) -> Tensor:
    """Return which tokens each one sees, ``(batch, 1, sequence, sequence)`` bool."""
    same = documents.unsqueeze(1).unsqueeze(3) == documents.unsqueeze(1).unsqueeze(2)
    return same.tril()


def block_mask(documents: Tensor) -> BlockMask:
    """Return the same mask for FlexAttention.

    Its shapes depend only on those of ``documents``. So it is made without waiting for the device, and what was
    compiled for one batch can be used for the next.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # takes most of a second

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    rows, length = documents.shape
    return create_block_mask(sees, rows, None, length, length, device=str(documents.device))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None, *, grouped: bool) -> Tensor:
    """Return softmax attention, ``(batch, heads, queries, head_width)``.

    Args:
        query: ``(batch, heads, queries, head_width)``.
        key: ``(batch, kv_heads, keys, head_width)``, as ``value``; all three have one dtype.
        value: see ``key``.
        mask: made by `within_documents`, or a boolean array that fits ``(queries, keys)``. None: causal if there are as
            many queries as keys, else a single query that sees all keys.
        grouped: whether several heads share the same keys and values.
    """
    if mask is not None and not isinstance(mask, Tensor):
        attended: Tensor = _flex_attention(query)(query, key, value, block_mask=mask, enable_gqa=grouped)
        return attended
    # is_causal aligns queries and keys at the first token, so it is right only if nothing came before.
    causal = mask is None and query.shape[2] == key.shape[2]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _flex_attention(query: Tensor) -> Callable[..., Any]:
    """Return FlexAttention, compiled on a GPU, where it would otherwise store all scores.

    A caller that is compiled itself gets the plain function.
    """
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    if not query.is_cuda or torch.compiler.is_compiling():
        return plain
    return _compiled_flex_attention()


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain, dynamic=False)


class KeyValueCache:
    """The rotated keys and the values of the tokens seen so far, for decoding a few tokens at a time.

    Memory: ``2 * layers * batch * kv_heads * max_sequence_length * head_width`` values in the dtype of the keys,
    allocated at the first use. Attribute ``length`` is the number of tokens seen.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.length = 0
        self.capacity = settings.max_sequence_length
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer and return all of them.

        The new ones are ``(batch, kv_heads, new, head_width)``, all of them ``(batch, kv_heads, length + new,
        head_width)``. `Transformer.forward` advances ``length`` after the last layer.
        """
        if layer == len(self._keys):
            batch, heads, _, width = keys.shape
            self._keys.append(keys.new_empty(batch, heads, self.capacity, width))
            self._values.append(values.new_empty(batch, heads, self.capacity, width))
        end = self.length + keys.shape[2]
        self._keys[layer][:, :, self.length : end] = keys
        self._values[layer][:, :, self.length : end] = values
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]


class Layer(nn.Module):
    """``x <- x + attention(norm(x))``, then ``x <- x + feed_forward(norm(x))``, on ``(batch, sequence, width)``."""

    def __init__(self, settings: ModelSettings, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(settings.width, settings.norm_epsilon)
        self.attention = Attention(settings, index)
        self.feed_forward_norm = RMSNorm(settings.width, settings.norm_epsilon)
        self.feed_forward = FeedForward(settings)

    def forward(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None, mask: Tensor | BlockMask | None
    ) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cosine, sine, cache, mask)
        output: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return output


class Attention(nn.Module):
    """Causal self-attention; ``heads / kv_heads`` query heads share one head of keys and values."""

    def __init__(self, settings: ModelSettings, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_width = settings.width // settings.heads
        kv_heads = settings.kv_heads if settings.kv_heads is not None else settings.heads
        self.grouped = kv_heads != settings.heads
        self.query = Linear(settings.width, settings.width)
        self.key = Linear(settings.width, kv_heads * self.head_width)
        self.value = Linear(settings.width, kv_heads * self.head_width)
        self.output = Linear(settings.width, settings.width)
        self.query_norm = RMSNorm(self.head_width, settings.norm_epsilon) if settings.qk_norm else None
        self.key_norm = RMSNorm(self.head_width, settings.norm_epsilon) if settings.qk_norm else None

    def forward(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, cache: KeyValueCache | None, mask: Tensor | BlockMask | None
    ) -> Tensor:
        query = self._heads(self.query(hidden))
        key = self._heads(self.key(hidden))
        value = self._heads(self.value(hidden))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        new = query.shape[2]
        if cache is not None:
            before = cache.length
            key, value = cache.extend(self.index, key, value)
            if before and new > 1:
                mask = torch.ones(new, before + new, dtype=torch.bool, device=query.device).tril(before)
        attended = attend(query, key, value, mask, grouped=self.grouped)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        """Reshape ``(batch, sequence, heads * head_width)`` to ``(batch, heads, sequence, head_width)``."""
        batch, sequence, _ = projected.shape
        return projected.view(batch, sequence, -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (SwiGLU; Shazeer, 2002.05202), or ``down(gelu(up(x)))`` (tanh approximation)."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate = Linear(settings.width, settings.ffn_width) if settings.ffn == "swiglu" else None
        self.up = Linear(settings.width, settings.ffn_width)
        self.down = Linear(settings.ffn_width, settings.width)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate is None:
            inner = F.gelu(self.up(hidden), approximate="tanh")
        else:
            inner = F.silu(self.gate(hidden)) * self.up(hidden)
        output: Tensor = self.down(inner)
        return output


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + epsilon)`` over the last dimension, in float32.

    The result has the dtype of the matrix products that use it: it is cast once, rather than by each of them.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden.float(), self.weight.shape, self.weight.float(), self.epsilon)
        return normed.to(product_dtype(hidden))


class Linear(nn.Linear):
    """A matrix without bias; `Transformer.initialise` sets its values, not the global generator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised."""


class Embedding(nn.Embedding):
    """An embedding whose values `Transformer.initialise` sets."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised."""


def rotary_table(settings: ModelSettings) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine of the rotary angles, each ``(max_sequence_length, head_width)`` float32.

    The angles are ``position * theta^(-2i / head_width)``, i = 0 .. head_width/2 - 1 (RoFormer, 2104.09864, equation
    15). The sine of the first half is negated, so that `_rotate` needs no negation.
    """
    head_width = settings.width // settings.heads
    # float64: a position of 100,000 times a frequency near 1 loses digits in float32
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width
    positions = torch.arange(settings.max_sequence_length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, settings.rope_theta**-exponents)
    sine = angles.sin()
    return angles.cos().repeat(1, 2).float(), torch.cat((-sine, sine), 1).float()


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``(batch, heads, sequence, head_width)`` by the angles of its positions, in float32; keep its dtype."""
    values = heads.float()
    swapped = values.roll(values.shape[-1] // 2, -1)
    return torch.addcmul(values * cosine, swapped, sine).to(heads.dtype)
