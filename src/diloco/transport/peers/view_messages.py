"""Reports and next views as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.membership.change import NextView, Report
from diloco.membership.view import View

__all__ = ["adopted", "change_message", "next_view", "report_of"]


def change_message(mine: Report, why: str) -> dict[str, Any]:
    """A report, for the other survivors."""
    return {
        "kind": "change",
        "view": mine.view_id,
        "lost": sorted(mine.lost),
        "gone": sorted(mine.gone),
        "joining": sorted(mine.joining),
        "step": mine.step,
        "commits": [[fragment, outer_step, digest] for (fragment, outer_step), digest in mine.commits.items()],
        "why": why,
    }


def report_of(sender: int, message: Mapping[str, Any]) -> Report:
    """The report that a `change_message` holds."""
    commits = {(int(fragment), int(outer_step)): str(digest) for fragment, outer_step, digest in message["commits"]}
    lost, gone, joining = (frozenset(int(m) for m in message[name]) for name in ("lost", "gone", "joining"))
    return Report(sender, int(message["view"]), lost, gone, joining, int(message["step"]), commits)


def adopted(following: NextView) -> dict[str, Any]:
    """What was adopted, for who asks about the view before."""
    return {
        "kind": "adopted",
        "view": following.previous.id,
        "members": None if following.view is None else list(following.view.members),
        "from_step": following.from_step,
        "commits": [[fragment, outer_step, digest] for (fragment, outer_step), digest in following.commits.items()],
        "reason": following.reason,
        "joined": list(following.joined),
    }


def next_view(message: Mapping[str, Any], previous: View) -> NextView:
    """What an `adopted` message holds."""
    members = message["members"]
    return NextView(
        view=None if members is None else View(int(message["view"]) + 1, tuple(int(m) for m in members)),
        previous=previous,
        from_step=int(message["from_step"]),
        commits={(int(f), int(k)): str(digest) for f, k, digest in message["commits"]},
        reason=str(message["reason"]),
        joined=tuple(int(m) for m in message["joined"]),
    )
