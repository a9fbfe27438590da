"""Error feedback: what a codec loses in one round is added to the next pseudo-gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from diloco.algorithm.codec import Codec
from diloco.algorithm.memory import empty
from diloco.algorithm.numbers import check_number
from diloco.errors import CheckpointError, CodecError

__all__ = ["ErrorFeedback", "encode_with_residual"]


def encode_with_residual(codec: Codec, values: Tensor, residual: Tensor, decay: float, payload: Tensor) -> Tensor:
    """Encode ``values + decay * residual``; returns what that loses, the next residual.

    Args:
        values: ``(numel,)`` float32.
        residual: ``(numel,)`` float32, what was lost before.
        decay: beta.
        payload: ``(codec.payload_bytes(numel),)`` uint8, to be written.
    """
    lost = empty(values.numel(), torch.float32, values.device)
    torch.add(values, residual, alpha=decay, out=lost)
    codec._encode(lost, payload)
    codec._accumulate(payload, lost, -1.0)
    return lost


class ErrorFeedback(Codec):
    """A codec around a codec, for one fragment, with the residual e of what was lost so far.

    With v the values, Q the inner codec (encoded and decoded) and e starting at zero::

        send  Q(v + beta e);    e <- (v + beta e) - Q(v + beta e)

    as in SparseLoCo (2508.15706), whose ``decay`` beta is 0.95. So values too small for the codec add up until they get
    through; with a decay below 1 what waits for long is slowly forgotten. Where we differ: the new e is only a
    *candidate* until the round's outcome is known.

    - `commit`: the round was applied with our contribution; the candidate becomes the residual.
    - `rollback`: the round was void, or went on without us. Global parameters hold nothing of our contribution and the
      next pseudo-gradient contains all of its work again; so the old residual stays, or that work would count twice.

    One of the two must come between two calls of `encode`. The payload is the inner codec's, and so are `cut`,
    `decode`, `accumulate` and `validate`, which know nothing of the residual.

    Memory: 4 bytes per value, and 4 more from `encode` to `commit` or `rollback`. The residual follows the values to
    their device.

    Args:
        codec: Q.
        numel: values of the fragment.
        decay: beta, from 0 to 1; 1: nothing is forgotten.

    Raises:
        ConfigurationError: if ``decay`` is out of range.

    >>> from diloco.algorithm.codec import make_codec
    >>> codec = ErrorFeedback(make_codec("fp4", block_size=8), numel=2)
    >>> values = torch.tensor([1.0, 0.005])  # the second is 1/200 of the first: too small for fp4
    >>> for _ in range(3):
    ...     payload = codec.encode(values)
    ...     codec.commit()
    ...     print(codec.decode(payload, 2))
    tensor([1., 0.])
    tensor([1., 0.])
    tensor([1.0000, 0.0156])
    """

    def __init__(self, codec: Codec, numel: int, *, decay: float = 1.0) -> None:
        check_number("error feedback's decay", decay, 0, 1)
        self.codec = codec
        self.numel = numel
        self.decay = decay
        self.name = f"{codec.name}+error-feedback"
        self.implementation = codec.implementation
        self.saturation_limit = codec.saturation_limit
        self.block_size = codec.block_size
        self._residual = torch.zeros(numel, dtype=torch.float32)
        self._candidate: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """``(numel,)`` float32: e, as of the last committed round."""
        return self._residual

    @property
    def pending(self) -> bool:
        """Whether `encode` was called and neither `commit` nor `rollback` since."""
        return self._candidate is not None

    def commit(self) -> None:
        """The round was applied with our contribution: what it lost is carried on.

        Raises:
            CodecError: if nothing was encoded since the last outcome. Nothing was changed.
        """
        if self._candidate is None:
            raise CodecError(
                f"{self.name}: commit() without an encode() before it; one commit() or rollback() belongs to each "
                "encode(). The residual is as it was."
            )
        self._residual, self._candidate = self._candidate, None

    def rollback(self) -> None:
        """The round did not take our contribution: the residual stays. Without effect if nothing is pending."""
        self._candidate = None

    def parameters(self) -> Mapping[str, int]:
        return self.codec.parameters()

    def payload_bytes(self, numel: int) -> int:
        return self.codec.payload_bytes(numel)

    def state_dict(self) -> dict[str, Tensor]:
        """``residual`` and, while a round is in flight, ``candidate``: each ``(numel,)`` float32, not copied."""
        state = {"residual": self._residual}
        if self._candidate is not None:
            state["candidate"] = self._candidate
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over copies of what `state_dict` gave.

        Raises:
            CheckpointError: if a tensor is missing, unknown, or of another size or type. Nothing was loaded.
        """
        if not {"residual"} <= set(state) <= {"residual", "candidate"}:
            raise CheckpointError(
                f"{self.name}: the saved state holds {sorted(state)}; it must hold 'residual' and, with a round in "
                "flight, 'candidate'. Nothing was loaded."
            )
        for key, saved in state.items():
            if saved.shape != (self.numel,) or saved.dtype != torch.float32:
                raise CheckpointError(
                    f"{self.name}: the saved {key} has shape {tuple(saved.shape)} and type {saved.dtype}; "
                    f"it must be ({self.numel},) torch.float32. Nothing was loaded."
                )
        device = self._residual.device
        self._residual = state["residual"].to(device, copy=True)
        self._candidate = state["candidate"].to(device, copy=True) if "candidate" in state else None

    def _encode(self, values: Tensor, payload: Tensor) -> None:
        if values.numel() != self.numel:
            raise CodecError(
                f"{self.name} holds the residual of {self.numel} values but was given {values.numel()}; "
                "each fragment needs one of its own. Nothing was encoded."
            )
        if self._candidate is not None:
            raise CodecError(
                f"{self.name}: encode() was called while a round is in flight. Call commit() or rollback() first. "
                "Nothing was encoded."
            )
        self._residual = self._residual.to(values.device)
        self._candidate = encode_with_residual(self.codec, values, self._residual, self.decay, payload)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        self.codec._decode(payload, out)

    def _accumulate(self, payload: Tensor, out: Tensor, weight: float) -> None:
        self.codec._accumulate(payload, out, weight)

    def _cut(self, payload: Tensor, numel: int, start: int, stop: int) -> Tensor:
        return self.codec._cut(payload, numel, start, stop)

    def _find_fault(self, payload: Tensor, numel: int) -> str | None:
        return self.codec._find_fault(payload, numel)
