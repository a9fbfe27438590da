"""Faults to inject into rounds, given as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from diloco.algorithm import Contribution, RoundId
from diloco.errors import ConfigurationError, nearest

__all__ = ["Fault", "FaultKind", "arrivals", "parse_fault"]

FaultKind = Literal["drop", "late", "truncate", "non-finite", "miss-commit"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one replica in one round.

    Attributes:
        kind: ``drop``: the contribution never arrives; ``late``: it arrives ``seconds`` after it was sent;
            ``truncate``: its last byte is missing; ``non-finite``: its bytes decode to NaN or are not a valid payload;
            ``miss-commit``: the replica never receives the commit of the round and continues without it.
        replica: the replica that has the fault.
        round: the round in which it has the fault.
        seconds: the delay of a ``late`` contribution.
    """

    kind: FaultKind
    replica: int
    round: RoundId
    seconds: float = 0.0


def parse_fault(text: str) -> Fault:
    """Parse a fault from its text form.

    Raises:
        ConfigurationError: if a word is unknown or missing, or a value is not a number.

    >>> parse_fault("late replica=1 fragment=0 outer_step=3 seconds=2.5")
    Fault(kind='late', replica=1, round=RoundId(fragment=0, outer_step=3), seconds=2.5)
    """
    kind, *words = text.split() or [""]
    if kind not in get_args(FaultKind):
        raise ConfigurationError(
            f"The fault {text!r} has the unknown kind {kind!r}; {nearest(kind, get_args(FaultKind))}"
        )
    try:
        fields = {name: float(value) for name, value in (word.split("=") for word in words)}
        seconds = fields.pop("seconds", 0.0)
        replica, fragment, outer_step = (int(fields.pop(name)) for name in ("replica", "fragment", "outer_step"))
    except (KeyError, ValueError):
        fields = {"?": 0.0}
    if fields:
        raise ConfigurationError(
            f'The fault {text!r} can\'t be parsed. Write "KIND replica=R fragment=P outer_step=K [seconds=S]".'
        )
    return Fault(kind=kind, replica=replica, round=RoundId(fragment, outer_step), seconds=seconds)  # type: ignore[arg-type]  # checked above


def arrivals(
    contributions: Mapping[int, Contribution], faults: Sequence[Fault], timeout_s: float
) -> tuple[dict[int, Contribution], dict[int, str], float]:
    """Apply faults to the contributions of one round.

    Args:
        contributions: replica -> its contribution.
        faults: the faults of all rounds.
        timeout_s: a contribution that is later than this, in seconds, counts as missing.

    Returns:
        A mapping from replica to its contribution as it arrives, a mapping from replica to the reason why nothing
        arrives, and the delay of the latest contribution in seconds.
    """
    arrived: dict[int, Contribution] = {}
    absent: dict[int, str] = {}
    delay_s = 0.0
    for replica, contribution in contributions.items():
        mine = [fault for fault in faults if (fault.round, fault.replica) == (contribution.round, replica)]
        late_s = sum(fault.seconds for fault in mine if fault.kind == "late")
        if any(fault.kind == "drop" for fault in mine):
            absent[replica] = "sent nothing"
        elif late_s > timeout_s:
            absent[replica] = f"was {late_s:g} s late, but the limit is {timeout_s:g} s"
        else:
            arrived[replica] = _tampered(contribution, mine)
            delay_s = max(delay_s, late_s)
    return arrived, absent, delay_s


def _tampered(contribution: Contribution, faults: Sequence[Fault]) -> Contribution:
    for fault in faults:
        if fault.kind == "truncate":
            contribution = replace(contribution, payload=contribution.payload[:-1])
        elif fault.kind == "non-finite":
            contribution = replace(contribution, payload=torch.full_like(contribution.payload, 0xFF))
    return contribution
