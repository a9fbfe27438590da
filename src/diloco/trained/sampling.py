"""Sample the next token. The settings need no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from diloco.errors import ConfigurationError, NonFiniteError

if TYPE_CHECKING:
    import torch

__all__ = ["Sampling"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from the model's logits.

    Raises:
        ConfigurationError: a value is out of range.

    >>> Sampling(temperature=0)
    Sampling(temperature=0, top_k=50, top_p=None, min_p=None, repetition_penalty=1.0)
    """

    temperature: float = 0.8
    """Divides the logits. Values below 1 favour likely tokens, values above 1 make the text more random, and 0 always
    takes the likeliest token."""
    top_k: Annotated[int | None, arg(metavar="INT")] = 50
    """Draw only from this many likeliest tokens. None: from all."""
    top_p: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Draw only from the smallest set of likeliest tokens whose total probability reaches this value; applied after
    --top-k. Default: from all."""
    min_p: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Leave out tokens whose probability is below this fraction of the likeliest token's. Default: none."""
    repetition_penalty: float = 1.0
    """Values above 1 make tokens that have already occurred, also in the prompt, less likely: their positive logits are
    divided by it and the others multiplied (CTRL, 1909.05858)."""

    def __post_init__(self) -> None:
        for name, holds, works in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or None"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None"),
            ("min_p", self.min_p is None or 0 < self.min_p <= 1, "above 0 and at most 1, or None"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "a positive number"),
        ):
            if not holds:
                raise ConfigurationError(f"{name} must be {works}, got {getattr(self, name)}.")

    def draw(self, logits: torch.Tensor, occurred: Iterable[int], generator: torch.Generator) -> int:
        """Return the next token.

        Args:
            logits: ``(vocabulary,)`` float32.
            occurred: tokens of the text so far.
            generator: for the draws, on the same device.

        Raises:
            NonFiniteError: the logits are not finite.
        """
        import torch

        if not bool(logits.isfinite().all()):
            raise NonFiniteError(
                "The model returned logits that are not finite: its parameters are damaged or its training diverged. "
                "No further token was generated."
            )
        penalty = self.repetition_penalty
        if penalty != 1:
            tokens = torch.tensor(sorted(set(occurred)), dtype=torch.int64, device=logits.device)
            before = logits[tokens]
            penalised = before.where(before < 0, before / penalty)
            logits = logits.scatter(0, tokens, penalised.where(before >= 0, before * penalty))
        if self.temperature == 0:
            return int(logits.argmax())
        candidates, tokens = logits.sort(descending=True, stable=True)
        if self.top_k is not None:
            candidates, tokens = candidates[: self.top_k], tokens[: self.top_k]
        # Subtracting the largest first makes a tiny temperature give 0 and -inf instead of inf - inf.
        probabilities = ((candidates - candidates[0]) / self.temperature).softmax(0)
        if self.top_p is not None:
            # A token stays if those before it have not reached top_p; the first always stays.
            probabilities = probabilities.where(probabilities.cumsum(0) - probabilities < self.top_p, 0)
        if self.min_p is not None:
            probabilities = probabilities.where(probabilities >= self.min_p * probabilities[0], 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
