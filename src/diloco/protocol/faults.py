"""The faults of members in rounds, as each of the others has counted them, for users. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from diloco.membership import byzantine_quorum
from diloco.protocol.fields import MOST_RANK, Fields, MessageError

__all__ = ["Faults", "faults_message", "faults_seen", "read_faults"]

_MOST_REPORTED = 64


class Faults(NamedTuple):
    """The number of rounds in which one member was at fault, since both were members. Only `spoilt` is proven.

    >>> print(Faults(spoilt=3, late=1))
    3 spoilt, 1 late
    """

    spoilt: int = 0  # its contribution was one that no honest member sends
    missed: int = 0  # its contribution did not arrive in time, or was withdrawn
    against: int = 0  # its vote was the first one against the round
    late: int = 0  # it kept the round waiting for too long

    def __str__(self) -> str:
        return ", ".join(f"{times} {name}" for name, times in self._asdict().items() if times) or "none"


def faults_message(faults: Mapping[int, Faults], *, me: int) -> dict[str, list[list[int]]]:
    """Return the faults of the 64 other replicas with the most of them as JSON: fault -> [replica, rounds] pairs."""
    worst = sorted((each for each in faults if each != me), key=lambda each: -sum(faults[each]))[:_MOST_REPORTED]
    return {name: [[each, getattr(faults[each], name)] for each in sorted(worst)] for name in Faults._fields}


def read_faults(message: Mapping[str, Any]) -> dict[int, Faults]:
    """Return the faults that a `faults_message` reports.

    Raises:
        MessageError: the message is malformed.

    >>> read_faults(faults_message({1: Faults(late=2), 2: Faults(spoilt=3)}, me=1))
    {2: Faults(spoilt=3, missed=0, against=0, late=0)}
    """
    reported = {name: dict(sorted(Fields(message).pairs(name))) for name in Faults._fields}
    replicas = sorted(set().union(*reported.values()))
    if len(replicas) > _MOST_REPORTED or (replicas and replicas[-1] > MOST_RANK):
        raise MessageError(f"the faults must concern at most {_MOST_REPORTED} replicas, numbered up to {MOST_RANK}")
    return {each: Faults(*(reported[name].get(each, 0) for name in Faults._fields)) for each in replicas}


def faults_seen(replica: int, statuses: Mapping[int, Mapping[str, Any]]) -> Faults | None:
    """Return the faults that more than f of the other members have counted, or None if no member has reported any.

    Args:
        replica: the replica whose faults are returned.
        statuses: replica -> the status that it reports; malformed ones are ignored.

    >>> reported = {"members": [0, 1, 2], "faults": faults_message({2: Faults(against=5)}, me=0)}
    >>> faults_seen(2, {0: reported, 1: reported}), faults_seen(0, {1: reported}), faults_seen(1, {})
    (Faults(spoilt=0, missed=0, against=5, late=0), Faults(spoilt=0, missed=0, against=0, late=0), None)
    """
    others = (_faults_in(replica, status) for reporter, status in statuses.items() if reporter != replica)
    reported = [faults for faults in others if faults is not None]
    if not reported:
        return None
    enough = min(byzantine_quorum(len(reported) + 1), len(reported))
    return Faults(*(sorted(counts)[-enough] for counts in zip(*reported, strict=True)))


def _faults_in(replica: int, status: Mapping[str, Any]) -> Faults | None:
    """Return the faults of a member as a status of the same view reports them, or None if the status is malformed."""
    try:
        members, reported = Fields(status).ranks("members"), read_faults(Fields(status).message("faults"))
    except ValueError:
        return None
    return reported.get(replica, Faults()) if replica in members else None
