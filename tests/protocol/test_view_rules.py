"""Each rule of a view change has a network in which leaving it out makes two histories, or ends an honest member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco.protocol import ViewChange, Views

Patch = Callable[[pytest.MonkeyPatch], None]


def no_promise(patch: pytest.MonkeyPatch) -> None:
    """A report binds nobody: its sender still accepts what an earlier ballot proposes."""
    receive, propose = ViewChange.receive_report, ViewChange.receive_proposal

    def receive_proposal(self: ViewChange, sender: int, proposal: Any) -> None:
        if proposal.ballot > self.mine.ballot:
            self._raise(proposal.ballot)
        propose(self, sender, proposal)

    def current(self: ViewChange) -> Any:
        return {
            rank: each for rank, each in self._reports.items() if self._rules.replica_of(rank) not in self.mine.lost
        }

    patch.setattr(ViewChange, "receive_report", lambda self, report: receive(self, replace(report, ballot=0)))
    patch.setattr(ViewChange, "receive_proposal", receive_proposal)
    patch.setattr(ViewChange, "_current_reports", current)


def nothing_stands(patch: pytest.MonkeyPatch) -> None:
    """A proposer does not take over what somebody may have adopted."""
    patch.setattr(ViewChange, "_standing", lambda self, reports: None)
    patch.setattr(ViewChange, "_may_switch", lambda self, accepted: True)


def enough_accept(patch: pytest.MonkeyPatch) -> None:
    """A new proposal is adopted once a quorum has accepted it, and not all that stay."""
    chosen = ViewChange._chosen

    def without_reports(self: ViewChange) -> Any:
        proposal = self._proposal
        if proposal is not None:
            self._proposal = type(proposal)(proposal.ballot, proposal.following, {})
        following = chosen(self)
        self._proposal = proposal
        return following

    patch.setattr(ViewChange, "_chosen", without_reports)


def no_quorum(patch: pytest.MonkeyPatch) -> None:
    """What is proposed again is adopted by any number of members."""
    patch.setattr(ViewChange, "_refusal", lambda self, lost, joining: "")


def silence_ends(patch: pytest.MonkeyPatch) -> None:
    """Who was silent counts as ended once its end is seen."""
    extend = ViewChange.extend

    def later(self: ViewChange, *, gone: Any = (), **more: Any) -> None:
        self.mine = replace(self.mine, apart=self.mine.apart.difference(gone))
        extend(self, gone=gone, **more)

    patch.setattr(ViewChange, "extend", later)


def no_guard(patch: pytest.MonkeyPatch) -> None:
    """Others join right after a member was lost by silence."""
    patch.setattr(Views, "_is_estranged", lambda self, replica: False)
