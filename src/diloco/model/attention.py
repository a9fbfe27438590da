"""Who attends to whom, and the kernel that computes it.

Without documents the mask is the causal one, which `scaled_dot_product_attention` does with its fastest kernel. A mask
given as an array would keep it from that kernel, so on CUDA documents are kept apart by FlexAttention, which skips the
blocks that nobody sees; elsewhere by a boolean array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["attend", "block_mask", "boolean_mask", "within_documents"]


def within_documents(documents: Tensor) -> Tensor | BlockMask:
    """What lets each token see those before it in its own document, as `attend` takes it.

    Args:
        documents: ``(batch, sequence)`` int64, equal where two tokens of a row belong to one document.
    """
    return block_mask(documents) if documents.is_cuda else boolean_mask(documents)


def boolean_mask(documents: Tensor) -> Tensor:
    """``(batch, 1, sequence, sequence)`` bool: which tokens each one sees."""
    same = documents.unsqueeze(1).unsqueeze(3) == documents.unsqueeze(1).unsqueeze(2)
    return same.tril()


def block_mask(documents: Tensor) -> BlockMask:
    """The same for FlexAttention. Its shapes depend on those of ``documents`` alone, so it is made without waiting for
    the device, and what was compiled for one batch serves the next.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # most of a second, for those who need it

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    rows, length = documents.shape
    return create_block_mask(sees, rows, None, length, length, device=str(documents.device))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None, *, grouped: bool) -> Tensor:
    """Softmax attention, ``(batch, heads, queries, head_width)``.

    Args:
        query: ``(batch, heads, queries, head_width)``.
        key: ``(batch, kv_heads, keys, head_width)``, as ``value``; all three of one dtype.
        value: see ``key``.
        mask: made by `within_documents`, or a boolean array that fits ``(queries, keys)``; None: causal, where there
            are as many queries as keys, else a single query that sees all.
        grouped: whether several heads share one of the keys and values.
    """
    if mask is not None and not isinstance(mask, Tensor):
        attended: Tensor = _flex_attention(query)(query, key, value, block_mask=mask, enable_gqa=grouped)
        return attended
    # is_causal aligns queries and keys at the first token, so it serves only where nothing came before.
    causal = mask is None and query.shape[2] == key.shape[2]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _flex_attention(query: Tensor) -> Callable[..., Any]:
    """Compiled where it runs on a GPU, by itself or with what it is called from: else it would hold all scores."""
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
