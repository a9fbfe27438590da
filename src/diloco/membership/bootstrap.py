"""The choice of the replica that founds a view if several search for one. Pure: takes their announcements.

Each candidate votes for the view that the first one that it hears is to found, and announces the vote. It can change
the vote only to a later view, and only if the one that it voted for has itself voted otherwise, no earlier than for
that view. As no vote goes back, that one then never founds it. So of all candidates one gets the votes of enough
members of the newest view, and none of these continues or founds with others. What a candidate had accepted before
still binds it, as a member that nobody hears may have adopted it.

A process that was started again votes, too, but its vote does not count among those of the members: it can't vouch for
the one that it replaces, as others may have continued because that one had ended. The founder is a member of every view
in which others may be, so that these do not continue because all the others of that view have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from diloco.membership.next_view import Policy, refusal
from diloco.membership.values import GREATEST, Rank, View, names_of

_MAX_VIEWS_AHEAD = 1000  # a view that a member names can't be later than another one's by more than this


@dataclass
class Candidate:
    """The announcement of a replica that searches for the others. Its views and its vote hold for all its searches."""

    number: Rank  # the replica's number
    held_step: Annotated[int, Meta(ge=-1, le=GREATEST)] = -1  # the newest step that it could resume from; -1 for none
    last: View | None = None  # the newest view that it was a member of; None: none since its process began
    agreed: View | None = None  # the view after it that it had accepted; None: none
    vote: View | None = None  # the view of the founder that it votes for; None: it has not voted
    founds: bool = True  # whether it may found a view where none of those that search was a member of one


def founded_view(
    me: Candidate, others: Sequence[Candidate], policy: Policy, *, left: Collection[int] = (), alone: bool = False
) -> View | None:
    """Let ``me`` vote, and return the view of this replica alone that it founds for the others to join, or None.

    The founder is the replica with the newest step; of several, the one with the lowest number. Where none of them was
    a member, it is one that may found. If any of them was, it is one of the newest view, and of those that one of them
    had agreed to, and founds only if enough members of these vote for it, so that no others can be continuing from
    them.

    Args:
        others: the other replicas that are searching, each as it was heard after the last vote of ``me``, and once each
            has had the time to announce itself.
        left: replicas that have finished the run; of these, none can be continuing.
        alone: whether this replica, which was a member of no view, knows no other one to ask.

    >>> founded_view(Candidate(2, 150), [Candidate(1, 100)], Policy())
    View(id=0, members=(2,))
    >>> lost = Candidate(2, 150, View(7, (0, 1, 2)))
    >>> founded_view(lost, [Candidate(1, 140, View(7, (0, 1, 2)))], Policy()), lost.vote
    (None, View(id=8, members=(2,)))
    >>> founded_view(lost, [Candidate(1, 140, View(7, (0, 1, 2)), vote=lost.vote)], Policy())
    View(id=8, members=(2,))
    """
    heard, (newest, others) = others, _credible(me, others)
    there = (me, *others)
    agreed = [each.agreed for each in there if each.agreed and newest and each.agreed.id > newest.id]
    views = [] if newest is None else [newest, *agreed]  # in which others may be
    if newest is None:
        eligible = [each for each in there if each.founds]
    else:
        eligible = [each for each in there if all(each.number in view.members for view in views)]
    first = min((-each.held_step, each.number) for each in eligible or [me])[1]
    known = [view.id for view in views]
    known += [each.vote.id - (each.vote.members == (first,)) for each in there if each.vote is not None]
    founded = View(max(known, default=-1) + 1, (first,))  # later than all of them, and than votes for others
    if alone:
        return View(founded.id, (me.number,))
    if not eligible:
        return None
    if newest is None:
        return founded if first == me.number else None

    ended = {*left, *(each.number for each in there if each.last is None)}
    members = [each for each in there if each.last is not None]

    def are_enough(counted: Collection[Candidate], votes: Collection[View] = ()) -> bool:
        """Return whether these members may continue from every view that others may be in."""
        numbers = {each.number for each in counted}
        joining = {each.number for each in there}.difference(numbers)
        return not any(
            refusal(view, {*view.members}.difference(numbers), policy, gone=ended, joining=joining)
            for view in (*views, *(vote for vote in votes if vote.id > newest.id and vote != founded))
        )

    if _may_vote(me, newest, founded, heard, left) and are_enough(members):
        me.vote = founded
    if first != me.number or me.vote != founded:
        return None
    voters = [each for each in members if each.vote == founded]
    return founded if are_enough(voters, [each.vote for each in there if each.vote is not None]) else None


def missing_members(me: Candidate, others: Sequence[Candidate]) -> str:
    """Return a sentence, for a message, on who of the newest view is not searching; "" if nobody is missing."""
    newest, others = _credible(me, others)
    absent = {*(newest.members if newest else ())} - {me.number, *(each.number for each in others)}
    if not absent:
        return ""
    are, they_have = ("is", "it has") if len(absent) == 1 else ("are", "they have")
    return (
        f" Of the newest view, {names_of(absent)} {are} missing. If {they_have} ended for good, start the others "
        "again from their checkpoints."
    )


def _credible(me: Candidate, others: Sequence[Candidate]) -> tuple[View | None, list[Candidate]]:
    """Return the newest view that counts, and the other candidates that do.

    A view that some of a view's members continued in follows it soon, and has one of them among the searching: two sets
    that may continue share a member. So only members of a view that counts can name a later one, not much later, and a
    stranger can't keep others from founding by naming a view, or a step, that does not exist.
    """
    if me.last is None:
        views = (each.last for each in others if each.last is not None)
        return max(views, key=lambda view: view.id, default=None), [*others]
    newest, members = me.last, {*me.last.members}
    while True:
        latest = newest.id + _MAX_VIEWS_AHEAD
        there = [
            each
            for each in others
            if each.number in members
            and all(view is None or view.id <= latest for view in (each.last, each.agreed, each.vote))
        ]
        later = max([newest, *(each.last for each in there if each.last)], key=lambda view: view.id)
        if later is newest:
            return newest, there
        newest = later
        members.update(later.members)


def _may_vote(me: Candidate, newest: View, founded: View, others: Sequence[Candidate], left: Collection[int]) -> bool:
    """Return whether ``me`` may vote for ``founded``: nobody founds any more what it voted for before, if it did."""
    before = me.vote
    if founded.id > newest.id + _MAX_VIEWS_AHEAD:  # the others would not believe it
        return False
    if before is None or before.id <= newest.id or before.members == (me.number,):
        return True
    return not {*before.members}.difference(left) or any(
        each.vote is not None and each.vote.id >= before.id and each.vote != before
        for each in others
        if each.number in before.members
    )
