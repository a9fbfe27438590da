"""Error feedback, which adds the quantisation error of one round to the next pseudo-gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.algorithm.codec.base import Codec
from diloco.algorithm.memory import empty
from diloco.algorithm.numbers import check_number
from diloco.errors import CheckpointError, CodecError

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Encodes the values of one fragment and keeps the residual e of the quantisation error.

    With v the values, Q the codec (encoding followed by decoding) and e starting at zero::

        send  Q(v + beta e);    e <- (v + beta e) - Q(v + beta e)

    as in SparseLoCo (2508.15706), where ``decay`` (beta) is 0.95. Values that are too small for the codec add up until
    they are sent; with a decay below 1 a residual that waits for long slowly decays. In contrast to SparseLoCo, the new
    e is only a *candidate* until the outcome of the round is known:

    - `commit`: the round was applied with this contribution. The candidate becomes the residual.
    - `rollback`: the round was void or excluded this contribution. The global parameters contain nothing of it, and the
      next pseudo-gradient contains all of its work again. So the old residual stays; otherwise that work would count
      twice.

    Call one of the two between two calls of `encode`. Payloads are those of the codec.

    Memory: 4 bytes per value, and 4 more from `encode` to `commit` or `rollback`. The residual follows the values to
    their device.

    Args:
        codec: Q.
        numel: The number of values of the fragment.
        decay: beta, from 0 to 1; 1 keeps the whole residual.

    Raises:
        ConfigurationError: if ``decay`` is out of range.

    >>> from diloco.algorithm.codec.base import make_codec
    >>> codec = make_codec("fp4", block_size=8)
    >>> feedback = ErrorFeedback(codec, numel=2)
    >>> values = torch.tensor([1.0, 0.005])  # the second is 1/200 of the first: too small for fp4
    >>> for _ in range(3):
    ...     payload = feedback.encode(values)
    ...     feedback.commit()
    ...     print(codec.decode(payload, 2))
    tensor([1., 0.])
    tensor([1., 0.])
    tensor([1.0000, 0.0156])
    """

    def __init__(self, codec: Codec, numel: int, *, decay: float = 1.0) -> None:
        check_number("the error-feedback decay", decay, 0, 1)
        self.codec = codec
        self.numel = numel
        self.decay = decay
        self._residual = torch.zeros(numel, dtype=torch.float32, device="cpu")
        self._candidate: Tensor | None = None

    def encode(self, values: Tensor) -> Tensor:
        """Return the payload of ``values``, ``(numel,)`` float32, plus the residual.

        Raises:
            CodecError: if their number is another, or a round is in flight. Nothing was encoded.
        """
        if values.numel() != self.numel or self._candidate is not None:
            why = "a round is in flight" if self._candidate is not None else f"there are {self.numel} values"
            raise CodecError(f"{values.numel()} values can't be encoded with error feedback: {why}.")
        self._residual = self._residual.to(values.device)
        error = empty(values.numel(), torch.float32, values.device)
        torch.add(values, self._residual, alpha=self.decay, out=error)
        payload = self.codec.encode(error)
        self.codec.accumulate(payload, error, -1.0)
        self._candidate = error
        return payload

    @property
    def residual(self) -> Tensor:
        """The residual e after the last committed round, ``(numel,)`` float32."""
        return self._residual

    @property
    def pending(self) -> bool:
        """Whether `encode` was called and neither `commit` nor `rollback` has followed."""
        return self._candidate is not None

    def commit(self) -> None:
        """Adopt the candidate as residual, after a round that was applied with this contribution.

        Raises:
            CodecError: if nothing was encoded since the last commit or rollback. Nothing was changed.
        """
        if self._candidate is None:
            raise CodecError(
                "commit() was called without an encode() before it. Each encode() needs one commit() or rollback(). "
                "The residual is unchanged."
            )
        self._residual, self._candidate = self._candidate, None

    def rollback(self) -> None:
        """Drop the candidate, after a round without this contribution. Has no effect if nothing is pending."""
        self._candidate = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the ``residual`` and, with a round in flight, the ``candidate``: ``(numel,)`` float32, not copied."""
        state = {"residual": self._residual}
        if self._candidate is not None:
            state["candidate"] = self._candidate
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load copies of the tensors that `state_dict` returned.

        Raises:
            CheckpointError: if a tensor is missing, unknown, or of another size or type. Nothing was loaded.
        """
        if not {"residual"} <= set(state) <= {"residual", "candidate"}:
            raise CheckpointError(
                "The saved state of error feedback must contain 'residual' and, with a round in flight, 'candidate', "
                f"but it contains {sorted(state)}. Nothing was loaded."
            )
        for key, saved in state.items():
            if saved.shape != (self.numel,) or saved.dtype != torch.float32:
                raise CheckpointError(
                    f"The saved {key} must have shape ({self.numel},) and type torch.float32, but it has "
                    f"shape {tuple(saved.shape)} and type {saved.dtype}. Nothing was loaded."
                )
        device = self._residual.device
        self._residual = state["residual"].to(device, copy=True)
        self._candidate = state["candidate"].to(device, copy=True) if "candidate" in state else None
