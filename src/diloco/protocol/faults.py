"""In how many rounds members were at fault, as each of the others has seen it, for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from diloco.membership.quorum import more_than_could_lie
from diloco.protocol.fields import MOST_RANK, Fields

__all__ = ["Faults", "faults_message", "faults_seen", "read_faults"]

_MOST_REPORTED = 64


class Faults(NamedTuple):
    """Of one member, since both were members; only the first is a proof.

    >>> print(Faults(spoilt=3, late=1))
    3 spoilt, 1 late
    """

    spoilt: int = 0  # its contribution was one that no honest member sends
    missed: int = 0  # no contribution of it came in time, or it took it back
    against: int = 0  # of the votes against the round, its was the first to come
    late: int = 0  # it kept the round waiting for longer than one waits

    def __str__(self) -> str:
        return ", ".join(f"{times} {name}" for name, times in self._asdict().items() if times) or "none"


def faults_message(faults: Mapping[int, Faults], *, me: int) -> dict[str, list[list[int]]]:
    """Each fault, with replica and rounds, as JSON; of the 64 others with the most of them."""
    worst = sorted((each for each in faults if each != me), key=lambda each: -sum(faults[each]))[:_MOST_REPORTED]
    return {name: [[each, getattr(faults[each], name)] for each in sorted(worst)] for name in Faults._fields}


def read_faults(message: Mapping[str, Any]) -> dict[int, Faults]:
    """What `faults_message` was given, as far as it was told.

    Raises:
        ValueError: it is something else.

    >>> read_faults(faults_message({1: Faults(late=2), 2: Faults(spoilt=3)}, me=1))
    {2: Faults(spoilt=3, missed=0, against=0, late=0)}
    """
    told = {name: dict(sorted(Fields(message).pairs(name))) for name in Faults._fields}
    replicas = sorted(set().union(*told.values()))
    if len(replicas) > _MOST_REPORTED or (replicas and replicas[-1] > MOST_RANK):
        raise ValueError(f"it tells of more than {_MOST_REPORTED} replicas, or of one that can't be")
    return {each: Faults(*(told[name].get(each, 0) for name in Faults._fields)) for each in replicas}


def faults_seen(replica: int, statuses: Mapping[int, Mapping[str, Any]]) -> Faults | None:
    """The faults that more of the other members have counted than could lie; None: none of them has told any.

    Args:
        replica: whose faults.
        statuses: replica -> what it says of itself and others; what it can't mean counts as not told.

    >>> told = {"members": [0, 1, 2], "faults": faults_message({2: Faults(against=5)}, me=0)}
    >>> faults_seen(2, {0: told, 1: told}), faults_seen(0, {1: told}), faults_seen(1, {})
    (Faults(spoilt=0, missed=0, against=5, late=0), Faults(spoilt=0, missed=0, against=0, late=0), None)
    """
    others = (_faults_in(replica, status) for teller, status in statuses.items() if teller != replica)
    told = [faults for faults in others if faults is not None]
    if not told:
        return None
    enough = min(more_than_could_lie(len(told) + 1), len(told))
    return Faults(*(sorted(counts)[-enough] for counts in zip(*told, strict=True)))


def _faults_in(replica: int, status: Mapping[str, Any]) -> Faults | None:
    """What a status tells of a member of the same view; None: nothing that can be meant."""
    try:
        members, told = Fields(status).ranks("members"), read_faults(Fields(status).message("faults"))
    except ValueError:
        return None
    return told.get(replica, Faults()) if replica in members else None
