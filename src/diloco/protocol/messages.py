"""The messages between the members of a view, and the only place where they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.algorithm import RoundId
from diloco.errors import ConfigurationError
from diloco.membership import Agreed, Commits, NextView, Report, View, Vote
from diloco.protocol.fields import LEAST_FRAGMENT, MOST_DIGEST, Fields, MessageError
from diloco.protocol.headers import Header
from diloco.protocol.registry import Entry

__all__ = [
    "PROTOCOL_VERSION",
    "Adopted",
    "ChangeReport",
    "Leaving",
    "RoundVote",
    "ViewMessage",
    "adopted_message",
    "change_message",
    "next_view",
    "read",
    "read_answer",
    "speed_message",
    "speed_of",
    "view_message",
    "view_of",
]

PROTOCOL_VERSION = 12
"""The version of the protocol, raised whenever a replica of the previous version would misread this one's messages."""

_MOST_QUORUMS = 32  # a member adds one only if others are lost after it was ready and before any has adopted the view


@dataclass(frozen=True)
class RoundVote:
    """A vote on a round."""

    round: RoundId
    vote: Vote
    diverged: tuple[int, ...] = ()  # replicas whose state differs from the majority's
    donor: int = -1  # a replica that has the majority's state; -1: none is named

    def to_message(self, view_id: int) -> dict[str, Any]:
        """Convert to JSON."""
        return {
            "kind": "vote",
            "view": view_id,
            "round": [self.round.fragment, self.round.outer_step],
            "ok": self.vote.ok,
            "digest": self.vote.digest,
            "reason": self.vote.reason,
            "diverged": list(self.diverged),
            "donor": self.donor,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RoundVote:
        """Convert from JSON; `ValueError` names a malformed field."""
        fields = Fields(message)
        vote = Vote(
            fields.flag("ok"),
            fields.text("digest", MOST_DIGEST),
            fields.words("reason"),
        )
        return cls(RoundId(*fields.round("round")), vote, fields.ranks("diverged"), fields.rank("donor", -1))


@dataclass(frozen=True)
class ChangeReport:
    """A report on the end of a view, and the reason for the change."""

    report: Report
    why: str


@dataclass(frozen=True)
class Adopted:
    """What followed a view, for a rank that is still in it."""

    following: NextView


@dataclass(frozen=True)
class Leaving:
    """The sender's replica leaves after inner step ``step``, and has recently committed ``commits``."""

    step: int
    commits: Commits = field(default_factory=dict)

    @property
    def left_commits(self) -> frozenset[tuple[int, int, str]]:
        """The commits as in a `Report`."""
        return frozenset((fragment, outer_step, digest) for (fragment, outer_step), digest in self.commits.items())

    def to_message(self, view_id: int) -> dict[str, Any]:
        """Convert to JSON."""
        return {"kind": "leaving", "view": view_id, "step": self.step, "commits": _with_digests(self.commits)}


ViewMessage = Header | RoundVote | ChangeReport | Adopted | Leaving


def read(sender: int, message: Mapping[str, Any], view: View) -> tuple[int, ViewMessage]:
    """Return the id of the view that a message is about, and the parsed message.

    Args:
        sender: the sender's rank.
        message: the message as received.
        view: the current view, which an `Adopted` ends.

    Raises:
        MessageError: the kind is unknown, or a field is missing or malformed.
    """
    fields = Fields(message)
    kind, view_id = fields.text("kind"), fields.integer("view")
    parsed: ViewMessage
    if kind == "header":
        parsed = Header.from_message(message)
    elif kind == "vote":
        parsed = RoundVote.from_message(message)
    elif kind == "change":
        parsed = ChangeReport(_report_of(sender, fields, view), fields.words("why"))
    elif kind == "adopted":
        parsed = Adopted(next_view(message, view))
    elif kind == "leaving":
        parsed = Leaving(fields.integer("step"), fields.digests("commits"))
    else:
        raise MessageError(f"the message kind {kind!r:.80} is unknown")
    return view_id, parsed


def change_message(mine: Report, why: str) -> dict[str, Any]:
    """Return the message with a report for the other survivors."""
    return {
        "kind": "change",
        "view": mine.view_id,
        "unheard": sorted(map(list, mine.unheard)),
        "behind": sorted(map(list, mine.behind)),
        "unsteady": sorted(map(list, mine.unsteady)),
        "gone": sorted(mine.gone),
        "joining": sorted(mine.joining),
        "left": sorted(map(list, mine.left)),
        "left_commits": sorted(map(list, mine.left_commits)),
        "step": mine.step,
        "commits": _with_digests(mine.commits),
        "void": sorted(map(list, mine.void)),
        "voted": _with_digests(mine.voted),
        "ready": mine.ready,
        "agreed": None if mine.agreed is None else _agreed_message(mine.agreed),
        "why": why,
    }


def adopted_message(following: NextView) -> dict[str, Any]:
    """Return the message that tells a rank in the previous view what was adopted."""
    return {
        "kind": "adopted",
        "view": following.previous.id,
        "members": None if following.view is None else list(following.view.order),
        "from_step": following.from_step,
        "commits": _with_digests(following.commits),
        "void": sorted(map(list, following.void)),
        "reason": following.reason,
        "joined": list(following.joined),
        "left": [list(each) for each in following.left],
    }


def next_view(message: Mapping[str, Any], previous: View) -> NextView:
    """Return the view change in an `adopted` message about ``previous``, or in a welcome.

    Raises:
        MessageError: a field is missing or malformed.
    """
    fields = Fields(message)
    order = None if fields.is_none("members") else fields.ranks("members")  # in join order
    joined = fields.ranks("joined")
    try:
        view = None if order is None else View(fields.integer("view") + 1, tuple(sorted(order)), order)
    except ConfigurationError as error:
        raise MessageError(f"field 'members' is invalid: {error}") from error
    return NextView(
        view=view,
        previous=previous,
        from_step=fields.integer("from_step"),
        commits=fields.digests("commits"),
        reason=fields.words("reason"),
        joined=joined,
        void=fields.pairs("void", LEAST_FRAGMENT),
        left=tuple(sorted(fields.pairs("left"))),
    )


def read_answer(message: Mapping[str, Any], previous: View) -> dict[str, Any]:
    """Return the valid fields of a ``welcome`` or ``refused``, the answers to a request to join.

    Raises:
        MessageError: a field is missing or malformed.
    """
    fields = Fields(message)
    if message["kind"] == "refused":
        return {"kind": "refused", "reason": fields.words("reason"), "for_good": fields.flag("for_good")}
    following = next_view(message, previous)
    if following.view is None:
        raise MessageError("the welcome names a view without members")
    note = {} if "note" not in message or fields.is_none("note") else fields.message("note")
    return {**adopted_message(following), "view": fields.integer("view"), "kind": "welcome", "note": note}


def _report_of(sender: int, fields: Fields, view: View) -> Report:
    gone, joining = frozenset(fields.ranks("gone")), frozenset(fields.ranks("joining"))
    left_commits = frozenset((*round_key, digest) for round_key, digest in fields.digests("left_commits").items())
    return Report(
        sender,
        fields.integer("view"),
        unheard=fields.pairs("unheard"),
        behind=fields.pairs("behind"),
        unsteady=fields.pairs("unsteady"),
        gone=gone,
        joining=joining,
        step=fields.integer("step"),
        commits=fields.digests("commits"),
        void=fields.pairs("void", LEAST_FRAGMENT),
        voted=fields.digests("voted"),
        left=fields.pairs("left"),
        left_commits=left_commits,
        ready=fields.flag("ready"),
        agreed=_agreed_of(fields, view),
    )


def _agreed_message(agreed: Agreed) -> list[Any]:
    quorums = [[number, member] for number, members in enumerate(sorted(agreed.quorums)) for member in members]
    return [agreed.known, {**adopted_message(agreed.following), "quorums": quorums}]


def _agreed_of(fields: Fields, view: View) -> Agreed | None:
    if fields.is_none("agreed"):
        return None
    known, message = fields.numbered("agreed")
    quorums: dict[int, list[int]] = {}
    for number, member in sorted(Fields(message).pairs("quorums")):
        quorums.setdefault(number, []).append(member)
    if len(quorums) > _MOST_QUORUMS:
        raise MessageError(f"field 'quorums' must hold at most {_MOST_QUORUMS} sets, got {len(quorums)}")
    return Agreed(known, next_view(message, view), frozenset(map(tuple, quorums.values())))


def view_message(view: View | None) -> list[int]:
    """Return the identity and the members of a view that a searching replica announces; [] for None."""
    return [] if view is None else [view.id, *view.members]


def view_of(fields: Fields, name: str) -> View | None:
    """Return the view in a field that holds a `view_message`.

    Raises:
        MessageError: the field is missing or malformed.
    """
    values = fields.integers(name)
    try:
        return View(values[0], values[1:]) if values else None
    except ConfigurationError as error:
        raise MessageError(f"field {name!r} is invalid: {error}") from error


def _with_digests(commits: Mapping[tuple[int, int], str]) -> list[list[Any]]:
    return [[fragment, outer_step, digest] for (fragment, outer_step), digest in commits.items()]


def speed_message(steps_per_s: float) -> dict[str, Any]:
    """Return the message that reports how fast a replica trains."""
    return {"kind": "speed", "steps_per_s": repr(steps_per_s)}


def speed_of(message: Mapping[str, Any]) -> float:
    """Return the speed in a `speed_message`.

    Raises:
        MessageError: it is not a finite, positive number.

    >>> speed_of(speed_message(2.5))
    2.5
    """
    steps_per_s = Fields(message).number_in_text("steps_per_s")
    if not (steps_per_s > 0 and math.isfinite(steps_per_s)):
        raise MessageError(f"field 'steps_per_s' must be a finite number above 0, got {steps_per_s}")
    return steps_per_s


def facts_message(entry: Entry, *, answer: bool = False) -> dict[str, Any]:
    """Return the message with the arguments of a rank's loop; ``answer``: the receiver has already sent its own."""
    return {"kind": "facts", "answer": answer, **entry.to_message()}
