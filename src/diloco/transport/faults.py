"""Faults given as data: who, which round, what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.errors import ConfigurationError, nearest

__all__ = ["Fault", "FaultKind", "parse_fault", "tamper"]

FaultKind = Literal["drop", "late", "truncate", "non-finite", "miss-commit"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one replica in one round.

    Attributes:
        kind: ``drop``: the contribution never arrives; ``late``: it arrives ``seconds`` after it was sent;
            ``truncate``: its last byte is missing; ``non-finite``: its bytes decode to NaN or are no valid payload;
            ``miss-commit``: the replica never hears that the round was committed, and goes on without it.
        replica: that it happens to.
        round: in which it happens.
        seconds: for ``late``.
    """

    kind: FaultKind
    replica: int
    round: RoundId
    seconds: float = 0.0


def parse_fault(text: str) -> Fault:
    """A fault from its text form.

    Raises:
        ConfigurationError: if a word is unknown, missing or no number.

    >>> parse_fault("late replica=1 fragment=0 outer_step=3 seconds=2.5")
    Fault(kind='late', replica=1, round=RoundId(fragment=0, outer_step=3), seconds=2.5)
    """
    kind, *words = text.split() or [""]
    if kind not in get_args(FaultKind):
        raise ConfigurationError(
            f"the fault {text!r} begins with {kind!r}; {nearest(kind, get_args(FaultKind))} Nothing was started."
        )
    try:
        fields = {name: float(value) for name, value in (word.split("=") for word in words)}
        seconds = fields.pop("seconds", 0.0)
        replica, fragment, outer_step = (int(fields.pop(name)) for name in ("replica", "fragment", "outer_step"))
    except (KeyError, ValueError):
        fields = {"?": 0.0}
    if fields:
        raise ConfigurationError(
            f'the fault {text!r} can\'t be read. Write "KIND replica=R fragment=P outer_step=K [seconds=S]". '
            "Nothing was started."
        )
    return Fault(kind=kind, replica=replica, round=RoundId(fragment, outer_step), seconds=seconds)  # type: ignore[arg-type]  # checked above


def tamper(contribution: Contribution, faults: Sequence[Fault]) -> Contribution:
    """The contribution as it arrives under ``faults`` of the kinds that change its bytes."""
    for fault in faults:
        if fault.kind == "truncate":
            contribution = replace(contribution, payload=contribution.payload[:-1])
        elif fault.kind == "non-finite":
            contribution = replace(contribution, payload=torch.full_like(contribution.payload, 0xFF))
    return contribution
