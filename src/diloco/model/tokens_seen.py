"""A cache for models without one: it keeps the tokens, and every step reads all of them anew."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TokensSeen"]


class TokensSeen:
    """The tokens seen so far. Correct with every causal model; a token costs a forward pass of all before it.

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
