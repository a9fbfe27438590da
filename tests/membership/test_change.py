"""Agreement on the next view, report by report; `tests/protocol/test_view_properties.py` tests it on networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco.membership import Change, Policy, Report, View


def report_of(rank: int, **known: Any) -> Report:
    """Return the report of a rank that knows replica 2 to have ended, unless it does not hear others."""
    return Report(rank, 0, **({} if "unheard" in known else {"gone": frozenset({2})}), **known)


def change(rank: int = 0, replicas: int = 3, **known: Any) -> Change:
    return Change(report_of(rank, **known), View.of(replicas), 1, Policy(), "replica 2 is lost")


def agree(ours: Change, *reports: Report) -> bool:
    """Absorb equal reports, and then readiness for what follows; return whether the latter was news."""
    for report in reports:
        ours.absorb(report)
    return any([ours.absorb(replace(report, ready=True, agreed=ours.mine.agreed)) for report in reports])


def test_nothing_is_adopted_before_all_who_stay_say_the_same_and_are_ready() -> None:
    ours = change(step=4)
    assert ours.staying == (0, 1)
    assert ours.outcome() is None
    assert not ours.absorb(report_of(1, unheard=frozenset(), step=7)), "it holds nothing new"
    assert not ours.mine.ready, "replica 1 does not know yet that 2 has ended"
    assert ours.absorb(report_of(1, step=7)), "this rank is ready now"
    assert ours.mine.ready
    assert ours.outcome() is None, "replica 1 may not have received the report"
    assert not agree(ours, report_of(1, step=7))
    following = ours.outcome()
    assert following is not None
    assert (following.view, following.from_step) == (View(1, (0, 1)), 8)


def test_what_was_agreed_before_another_one_was_lost_is_adopted_first() -> None:
    """Replica 3 may have adopted it before replica 0 lost it."""
    voted = {(1, 1): "a", (3, 1): "a"}
    ours = change(replicas=4, unheard=frozenset({(0, 2), (1, 2)}), voted=voted)
    for rank in (1, 3):
        ours.absorb(report_of(rank, unheard=frozenset({(0, 2), (1, 2)}), commits={(rank, 1): "a"}, voted=voted))
    assert ours.mine.ready
    assert ours.outcome() is None, "replica 1 does not report that it is ready"
    ours.extend(unheard=frozenset({3}))
    assert ours.staying == (0, 1)
    agree(ours, report_of(1, unheard=frozenset({(0, 2), (1, 2), (0, 3)}), commits={(1, 1): "a"}))
    following = ours.outcome()
    assert following is not None
    assert following.view == View(1, (0, 1, 3))
    assert following.commits == {(1, 1): "a", (3, 1): "a"}
    theirs = change(rank=1, replicas=4, unheard=frozenset({(0, 2), (1, 2), (0, 3)}))
    agree(theirs, ours.mine)
    assert theirs.outcome() == following, "also for a rank that was never ready for it itself"


def exchange(changes: list[Change], times: int) -> None:
    """Let members receive each other's present reports, so many times."""
    for _ in range(times):
        reports = [each.mine for each in changes]
        for each in changes:
            for report in reports:
                if report.rank != each.mine.rank:
                    each.absorb(report)


@pytest.mark.parametrize("replicas", range(3, 8))
def test_two_sides_that_share_one_member_never_both_go_on(replicas: int) -> None:
    """One side adopts what the shared member was ready for; it then loses that side before it hears that they are."""
    middle = (replicas - 1) // 2
    sides = range(middle), range(middle + 1, replicas)
    members = [Change(Report(rank, 0), View.of(replicas), 1, Policy(), "") for rank in range(replicas)]
    for one, other in (sides, sides[::-1]):
        for rank in one:
            members[rank].extend(unheard=frozenset(other))
    shared = members[middle]
    for each in members:
        shared.absorb(each.mine)
    first, second = sorted(sides, key=lambda side: set(side).isdisjoint(shared.staying))
    exchange([members[rank] for rank in (*first, middle)], 2)
    assert all(members[rank].mine.ready for rank in (*first, middle))
    for rank in first:
        for other in (*first, middle):
            members[rank].absorb(members[other].mine)
    adopted = members[first[0]].outcome()
    assert adopted is not None
    assert adopted.view == View(1, tuple(sorted((*first, middle))))
    shared.extend(unheard=frozenset(first))
    exchange([members[rank] for rank in (middle, *second)], 4)
    assert set(shared.staying) == {middle, *second}
    assert [members[rank].outcome() for rank in (middle, *second)] == [adopted] * (1 + len(second))
