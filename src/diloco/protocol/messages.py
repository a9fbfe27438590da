"""What members of a view say to each other, as messages; and the one place where such messages are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.algorithm.averaging import RoundId
from diloco.membership.ballot import Vote
from diloco.membership.proofs import Commits, SignedVote
from diloco.membership.reports import Agreed, NextView, Report
from diloco.membership.view import View
from diloco.protocol.fields import LEAST_FRAGMENT, MOST_DIGEST, MOST_RANK, Fields
from diloco.protocol.headers import Header
from diloco.protocol.registry import Entry
from diloco.protocol.signing import SIGNATURE_CHARACTERS, sign

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
    "vote_text",
]

PROTOCOL_VERSION = 9
"""Raised whenever a replica of the version before would misread one of this version."""


@dataclass(frozen=True)
class RoundVote:
    """A vote about a round."""

    round: RoundId
    vote: Vote
    diverged: tuple[int, ...] = ()  # replicas whose state is not the majority's
    donor: int = -1  # a replica that has the majority's state; -1: none is named

    def signed(self, view_id: int, secret: bytes) -> RoundVote:
        """As its voter says it in a view, whose process has this secret."""
        key, vote = (self.round.fragment, self.round.outer_step), self.vote
        words = vote_text(view_id, key, ok=vote.ok, digest=vote.digest)
        return replace(self, vote=replace(vote, signature=sign(secret, words)))

    def to_message(self, view_id: int) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": "vote",
            "view": view_id,
            "round": [self.round.fragment, self.round.outer_step],
            "ok": self.vote.ok,
            "digest": self.vote.digest,
            "reason": self.vote.reason,
            "signature": self.vote.signature,
            "diverged": list(self.diverged),
            "donor": self.donor,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RoundVote:
        """From JSON; `ValueError` names the field of anything that is none."""
        fields = Fields(message)
        vote = Vote(
            fields.flag("ok"),
            fields.text("digest", MOST_DIGEST),
            fields.words("reason"),
            fields.text("signature", SIGNATURE_CHARACTERS),
        )
        return cls(RoundId(*fields.round("round")), vote, fields.ranks("diverged"), fields.rank("donor", -1))


def vote_text(view_id: int, key: tuple[int, int], *, ok: bool, digest: str) -> str:
    """What is signed."""
    return f"{view_id} {key[0]} {key[1]} {ok} {digest}"


@dataclass(frozen=True)
class ChangeReport:
    """A report about the end of a view, and what happened, in words."""

    report: Report
    why: str


@dataclass(frozen=True)
class Adopted:
    """What became of a view, for who asks about it."""

    following: NextView


@dataclass(frozen=True)
class Leaving:
    """The sender's replica leaves after inner step ``step``, and has committed ``commits`` lately."""

    step: int
    commits: Commits = field(default_factory=dict)

    @property
    def left_commits(self) -> frozenset[tuple[int, int, str]]:
        """As in a `Report`."""
        return frozenset((fragment, outer_step, digest) for (fragment, outer_step), digest in self.commits.items())

    def to_message(self, view_id: int) -> dict[str, Any]:
        """As JSON."""
        return {"kind": "leaving", "view": view_id, "step": self.step, "commits": _with_digests(self.commits)}


ViewMessage = Header | RoundVote | ChangeReport | Adopted | Leaving


def read(sender: int, message: Mapping[str, Any], view: View) -> tuple[int, ViewMessage]:
    """The view that a message is about, and what it says.

    Args:
        sender: its rank.
        message: as it came.
        view: the present one, which an `Adopted` ends.

    Raises:
        ValueError: it is none of those that are known, or a field of it is missing or is not what it should be.
    """
    fields = Fields(message)
    kind, view_id = fields.text("kind"), fields.integer("view")
    said: ViewMessage
    if kind == "header":
        said = Header.from_message(message)
    elif kind == "vote":
        said = RoundVote.from_message(message)
    elif kind == "change":
        said = ChangeReport(_report_of(sender, fields, view), fields.words("why"))
    elif kind == "adopted":
        said = Adopted(next_view(message, view))
    elif kind == "leaving":
        said = Leaving(fields.integer("step"), fields.digests("commits"))
    else:
        raise ValueError(f"its kind is {kind!r:.80}")
    return view_id, said


def change_message(mine: Report, why: str) -> dict[str, Any]:
    """A report, for the other survivors."""
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
        "heard": sorted(map(list, mine.heard.items())),
        "agreed": None if mine.agreed is None else [mine.agreed.known, adopted_message(mine.agreed.following)],
        "shown": [[vote.rank, *vote.round, vote.ok, vote.digest, vote.signature] for vote in sorted(mine.shown)],
        "why": why,
    }


def adopted_message(following: NextView) -> dict[str, Any]:
    """What was adopted, for who asks about the view before."""
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
    """What an `adopted` message about ``previous`` holds, or a welcome.

    Raises:
        ValueError: a field is missing or is not what it should be.
    """
    fields = Fields(message)
    order = None if fields.is_none("members") else fields.ranks("members")  # as they came
    joined = fields.ranks("joined")
    return NextView(
        view=None if order is None else View(fields.integer("view") + 1, tuple(sorted(order)), order),
        previous=previous,
        from_step=fields.integer("from_step"),
        commits=fields.digests("commits"),
        reason=fields.words("reason"),
        joined=joined,
        void=fields.pairs("void", LEAST_FRAGMENT),
        left=tuple(sorted(fields.pairs("left"))),
    )


def read_answer(message: Mapping[str, Any], previous: View) -> dict[str, Any]:
    """A ``welcome`` or ``refused``, for who has asked to join: what it should be, and nothing else.

    Raises:
        ValueError: a field is missing or is not what it should be.
    """
    fields = Fields(message)
    if message["kind"] == "refused":
        return {"kind": "refused", "reason": fields.words("reason"), "for_good": fields.flag("for_good")}
    following = next_view(message, previous)
    if following.view is None:
        raise ValueError("it welcomes to a view that nobody is in")
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
        heard=dict(fields.numbered_texts("heard", MOST_RANK, MOST_DIGEST)),
        shown=frozenset(SignedVote(*each) for each in fields.votes("shown", SIGNATURE_CHARACTERS)),
    )


def _agreed_of(fields: Fields, view: View) -> Agreed | None:
    if fields.is_none("agreed"):
        return None
    known, following = fields.numbered("agreed")
    return Agreed(known, next_view(following, view))


def _with_digests(commits: Mapping[tuple[int, int], str]) -> list[list[Any]]:
    return [[fragment, outer_step, digest] for (fragment, outer_step), digest in commits.items()]


def speed_message(steps_per_s: float) -> dict[str, Any]:
    """How fast a replica trains, for the others."""
    return {"kind": "speed", "steps_per_s": repr(steps_per_s)}


def speed_of(message: Mapping[str, Any]) -> float:
    """What `speed_message` was given.

    Raises:
        ValueError: it is no finite, positive number.

    >>> speed_of(speed_message(2.5))
    2.5
    """
    steps_per_s = Fields(message).number_in_text("steps_per_s")
    if not (steps_per_s > 0 and math.isfinite(steps_per_s)):
        raise ValueError(f"its 'steps_per_s' is {steps_per_s}, and should be a finite number above 0")
    return steps_per_s


def facts_message(entry: Entry, *, answer: bool = False) -> dict[str, Any]:
    """What a rank's loop was given; ``answer``: to one that has told its own."""
    return {"kind": "facts", "answer": answer, **entry.to_message()}
