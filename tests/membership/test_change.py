"""Agreement on the next view, report by report; `tests/protocol/test_view_properties.py` tests it on networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco.membership import Change, Policy, Report, SignedVote, View, proofs


def report_of(rank: int, **known: Any) -> Report:
    """Return the report of a rank that knows replica 2 to have ended, unless other knowledge is given."""
    something = known.keys() & {"unheard", "left", "joining"}
    return Report(rank, 0, **({} if something else {"gone": frozenset({2})}), **known)


def change(
    *,
    rank: int = 0,
    replicas: int = 3,
    size: int = 1,
    policy: Policy | None = None,
    order: tuple[int, ...] = (),
    **known: Any,
) -> Change:
    view = View(0, tuple(range(replicas)), order)
    return Change(report_of(rank, **known), view, size, policy or Policy(), "replica 2 is lost")


def agree(ours: Change, *reports: Report) -> bool:
    """Absorb equal reports, and then readiness for what follows; return whether the latter was news."""
    for report in reports:
        ours.absorb(report)
    return any([ours.absorb(replace(report, ready=True, agreed=ours.mine.agreed)) for report in reports])


def members_of(change: Change) -> tuple[int, ...]:
    following = change.outcome()
    assert following is not None
    assert following.view is not None
    return following.view.members


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


@pytest.mark.parametrize("replicas", [3, 4])
def test_what_was_agreed_before_stands_for_those_who_may_go_on(replicas: int) -> None:
    """A smaller side can't know whether the others, some of which have ended since, agreed on something else."""
    ours, others = change(replicas=replicas), range(replicas)
    stays = [other for other in others if other != 2]
    agree(ours, *(report_of(other) for other in stays[1:]))
    agreed = ours.outcome()
    assert agreed is not None
    assert ours.absorb(report_of(1, unheard=frozenset({(1, 0)}), gone=frozenset({2}))), "this is news for all"
    assert ours.staying == tuple(other for other in stays if other != 1)
    agree(ours, *(replace(ours.mine, rank=other) for other in ours.staying[1:]))
    following = ours.outcome()
    assert following is not None
    assert following.view == (agreed.view if replicas == 4 else None)


def test_every_rank_of_a_replica_that_stays_must_report() -> None:
    voted = {(1, 2): "digest"}
    ours = change(size=2, voted=voted)
    assert ours.audience == (1, 2, 3)
    for rank in (1, 2):
        ours.absorb(report_of(rank, ready=True))
        assert ours.outcome() is None
    agree(ours, report_of(1, voted=voted), report_of(2, voted=voted), report_of(3, commits={(1, 2): "digest"}))
    following = ours.outcome()
    assert following is not None
    assert following.commits == {(1, 2): "digest"}


def test_what_any_survivor_committed_is_committed_and_what_only_the_lost_one_did_is_not() -> None:
    voted = {(0, 1): "a", (1, 1): "b", (2, 1): "c"}
    ours = change(commits={(0, 1): "a"}, voted=voted)
    ours.absorb(Report(2, 0, commits={(2, 1): "c"}))
    agree(ours, report_of(1, commits={(1, 1): "b"}, voted=voted))
    following = ours.outcome()
    assert following is not None
    assert following.commits == {(0, 1): "a", (1, 1): "b"}


def test_a_joiner_that_is_lost_again_neither_joins_nor_counts_as_a_loss() -> None:
    ours = change(joining=frozenset({3}))
    agree(ours, *(report_of(rank, joining=frozenset({3})) for rank in (1, 2)))
    assert members_of(ours) == (0, 1, 2, 3)
    ours = change(joining=frozenset({3}))
    assert ours.extend(unheard=frozenset({3})), "the others must be told"
    assert ours.outcome() is None
    agree(ours, *(report_of(rank, joining=frozenset({3}), unheard=frozenset({(0, 3)})) for rank in (1, 2)))
    assert members_of(ours) == (0, 1, 2)


def test_whoever_is_left_out_itself_adopts_nothing() -> None:
    ours = change(rank=2)
    for rank in (0, 1):
        ours.absorb(report_of(rank, ready=True))
    assert ours.is_left_out
    assert ours.outcome() is None
    assert ours.alone().view is None
    stranger = change()
    assert not stranger.extend(unheard=frozenset({7}), gone=frozenset({7}), left=frozenset({(7, 1)}))


@pytest.mark.parametrize("accuser", [0, 3])
def test_one_that_accuses_two_others_is_the_one_to_go(accuser: int) -> None:
    """Whatever its number, and though the fourth member hears all."""
    others = tuple(each for each in range(4) if each != accuser)
    ours = change(rank=others[2], replicas=4, unheard=frozenset())
    ours.absorb(Report(accuser, 0, unheard=frozenset((accuser, other) for other in others[:2])))
    assert ours.staying == others
    agree(ours, *(replace(ours.mine, rank=other) for other in others[:2]))
    assert members_of(ours) == others


def test_a_single_bad_pair_costs_the_one_that_came_later_or_has_the_higher_number() -> None:
    """Whichever of the two reports it."""
    for rank, other in ((0, 2), (2, 0)):
        ours = change(rank=rank, unheard=frozenset())
        ours.extend(unheard=frozenset({other}))
        assert ours.staying == (0, 1)
        for order in ((1, 2, 0), (2, 0, 1)):  # also if another replica has joined since
            assert change(rank=rank, order=order, unheard=ours.mine.unheard).staying == (1, 2)


def test_the_order_in_which_they_came_is_kept() -> None:
    ours = change(order=(1, 2, 0), gone=frozenset({2}), unheard=frozenset())
    agree(ours, replace(ours.mine, rank=1))
    assert (following := ours.outcome()) is not None
    assert following.view == View(1, (0, 1), (1, 0))
    ours = change(order=(1, 2, 0), joining=frozenset({5, 4}), unheard=frozenset())
    agree(ours, *(replace(ours.mine, rank=other) for other in (1, 2)))
    assert (following := ours.outcome()) is not None
    assert following.view == View(1, (0, 1, 2, 4, 5), (1, 2, 0, 4, 5))


def test_those_who_join_together_have_a_way_to_each_other() -> None:
    """Of two unconnected joiners, the one with the lower number joins, whichever member knows of it."""
    ours = change(joining=frozenset({4, 5, 6}), unheard=frozenset())
    assert ours.extend(apart=frozenset({(5, 4)}))
    agree(ours, *(replace(ours.mine, rank=other) for other in (1, 2)))
    assert members_of(ours) == (0, 1, 2, 4, 6)


def test_who_is_behind_goes_where_the_others_are_enough() -> None:
    """Only if more than f members report it."""
    for behind, staying in (({2}, (0, 1)), ({1, 2}, (0, 1, 2)), ({0, 2}, (0, 1, 2))):
        ours = change(unheard=frozenset())
        ours.extend(behind=frozenset(behind))
        assert ours.staying == (0, 1, 2), "only one of three reports it"
        ours.absorb(report_of(1, unheard=frozenset(), behind=frozenset((1, other) for other in behind)))
        assert ours.staying == staying
    ours = change(unheard=frozenset(), policy=Policy(1, split="go-on"))
    ours.extend(behind=frozenset({1, 2}))
    ours.absorb(report_of(1, unheard=frozenset(), behind=frozenset({(1, 2), (2, 1)})))
    assert ours.staying == (0,)


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


def test_what_a_leaver_committed_is_committed_once_all_know_it() -> None:
    """A rank that learned of the leaving only from another survivor does not know what the leaver had committed."""
    left, commits = frozenset({(2, 7)}), frozenset({(0, 1, "a")})
    voted = {(0, 1): "a", (1, 1): "b"}
    ours = change(unheard=frozenset(), voted=voted)
    assert ours.extend(left=left, left_commits=commits)
    gone = frozenset({2})
    ours.absorb(report_of(1, gone=gone, left=left, ready=True))
    assert ours.outcome() is None
    agree(ours, report_of(1, gone=gone, left=left, left_commits=commits, commits={(1, 1): "b"}, voted=voted))
    following = ours.outcome()
    assert following is not None
    assert following.commits == {(0, 1): "a", (1, 1): "b"}
    theirs = change(rank=1, unheard=frozenset())
    assert theirs.absorb(report_of(0, gone=gone, left=left, left_commits=commits))
    assert theirs.mine.left_commits == commits


def test_what_any_survivor_decided_void_is_void_and_everything_else_goes_on_unless_somebody_joins() -> None:
    ours = change(void=frozenset({(0, 1)}))
    ours.absorb(Report(2, 0, void=frozenset({(2, 1)})))
    agree(ours, report_of(1, void=frozenset({(1, 1)})))
    following = ours.outcome()
    assert following is not None
    assert following.void == {(0, 1), (1, 1)}
    assert following.carries_over
    assert not replace(following, joined=(3,)).carries_over
    assert not replace(following, view=None).carries_over


def test_who_leaves_is_gone_with_its_greatest_step_and_all_must_know() -> None:
    ours = change(unheard=frozenset(), replicas=2)
    assert ours.extend(left=frozenset({(1, 7)}))
    assert (ours.staying, ours.mine.gone) == ((0,), {1})
    ours.extend(left=frozenset({(1, 8)}))  # another rank of it
    assert members_of(ours) == (0,), "as agreed before the other rank left"
    three = change()
    three.extend(left=frozenset({(2, 7)}))
    three.absorb(report_of(1, ready=True))
    assert three.outcome() is None, "replica 1 does not know yet that 2 has left"
    agree(three, report_of(1, gone=frozenset({2}), left=frozenset({(2, 7)})))
    following = three.outcome()
    assert following is not None
    assert (following.left, following.reason) == (((2, 7),), "replica 2 has left; replicas 0, 1 continue")


KEY = (0, 1)
MEAN = {KEY: "a"}


@pytest.mark.parametrize("replicas", [3, 4, 5])
def test_nobody_is_ready_before_it_is_known_that_all_have_voted_for_what_one_has_committed(replicas: int) -> None:
    """Rank 1 does not report its vote; its signature shows it."""
    known: dict[str, Any] = {"joining": frozenset({9})}
    ours, last = change(replicas=replicas, voted=MEAN, **known), replicas - 1
    others = [report_of(rank, voted=MEAN, **known) for rank in range(2, last)]
    agree(ours, report_of(1, **known), *others, report_of(last, commits=MEAN, **known))
    assert (ours.outcome(), ours.unproven) == (None, {last})
    known["shown"] = frozenset({SignedVote(1, KEY, True, "a", "its signature")})
    others = [report_of(rank, voted=MEAN, **known) for rank in range(2, last)]
    agree(ours, report_of(1, **known), *others, report_of(last, commits=MEAN, **known))
    following = ours.outcome()
    assert following is not None
    assert following.commits == MEAN
    assert not ours.unproven


def test_what_was_committed_is_proved_to_who_denies_it_and_who_voted_twice_goes() -> None:
    """Rank 2 sent rank 0 a vote for the round, and rank 1 a vote against it."""
    mine, denied, no = (
        SignedVote(rank, KEY, ok, "a" if ok else "", "s") for rank, ok in ((0, True), (2, True), (2, False))
    )
    yes = SignedVote(1, KEY, True, "a", "s")
    view, policy = View.of(3), Policy()
    ours = Change(Report(0, 0, commits=MEAN), view, 1, policy, "", {KEY: {0: mine, 1: yes, 2: denied}})
    against = Report(1, 0, voted=MEAN, void=frozenset({KEY}), shown=frozenset({no}))
    theirs = Change(against, view, 1, policy, "", {KEY: {1: yes, 2: no}})
    ours.absorb(theirs.mine)
    assert ours.mine.shown == {no, denied}
    theirs.absorb(ours.mine)
    for each in (ours, theirs):
        assert each.mine.behind >= {(each.mine.rank, 2)}
        assert each.why == "; replica 2 cast two different votes on one round"
    ours.absorb(theirs.mine)
    assert ours.staying == (0, 1), "two of three report it"
    for _ in range(2):
        theirs.absorb(ours.mine)
        ours.absorb(theirs.mine)
    following = theirs.outcome()
    assert following is not None
    assert following == ours.outcome()
    assert (following.commits, following.void) == (MEAN, frozenset())


def test_many_votes_of_one_liar_are_no_more_than_two() -> None:
    votes = [SignedVote(2, KEY, True, digest, "s") for digest in "abcd"]
    assert len(proofs.minimal_votes([*votes, replace(votes[0], signature="t")])) == 2


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
