"""The verdict on a round, which every rank derives alike from the headers of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from diloco.algorithm import Contribution, Uplink, Verdict, judge
from diloco.errors import CodecError
from diloco.membership import byzantine_quorum
from diloco.protocol.wire import Header

__all__ = ["donor_for", "header_of", "judge_headers"]

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


def header_of(contribution: Contribution, view_id: int, uplink: Uplink, *, taking_over: bool) -> Header:
    """Return the header of a contribution. The sender checks the payload, and withdraws an invalid one."""
    withdrawn = contribution.withdrawn
    if not withdrawn:
        try:
            contribution.codec.validate(contribution.payload, contribution.numel)
        except CodecError as error:
            withdrawn = str(error)
    buffers, integers = contribution.buffers, contribution.integers
    return Header(
        view_id,
        (contribution.round.fragment, contribution.round.outer_step),
        contribution.numel,
        contribution.weight,
        contribution.base_weight,
        contribution.digest,
        None if buffers is None else buffers.numel(),
        None if integers is None else integers.numel(),
        withdrawn,
        taking_over,
        uplink.bits_per_s,
        uplink.full,
        uplink.window_s,
    )


def judge_headers(
    headers: Mapping[int, Header],
    sample: Contribution,
    *,
    members: Sequence[int],
    ranks_per_replica: int,
    min_contributors: int | None,
) -> Verdict:
    """Return the verdict on a round, which is the same on every rank.

    The ranks at position s of their replicas, which hold the same shard, are judged together. A replica is in the mean
    if all its positions are.

    Args:
        headers: rank -> header, for every rank of every member.
        sample: a contribution with the codec of the round.
        members: the members of the view.
        ranks_per_replica: S.
        min_contributors: None: all members except those that are still adopting the state.
    """
    absent = {
        member: "is still fetching the state"
        for member in members
        if any(headers[member * ranks_per_replica + s].taking_over for s in range(ranks_per_replica))
    }
    needed = len(members) - len(absent) if min_contributors is None else min_contributors
    verdicts = []
    for position in range(ranks_per_replica):
        contributions = {
            member: _bare(headers[member * ranks_per_replica + position], member, sample)
            for member in members
            if member not in absent
        }
        verdicts.append(
            judge(
                contributions,
                members=members,
                min_contributors=max(1, needed),
                absent=absent,
                contents=False,
                holders=byzantine_quorum(len(contributions)),
            )
        )
    return _combined(verdicts, max(1, needed))


def donor_for(
    rank: int, headers: Mapping[int, Header], *, members: Sequence[int], ranks_per_replica: int
) -> int | None:
    """Return a replica with the state that the round applies to if ``rank`` holds a different one, else None.

    Args:
        rank: a rank that is still adopting the state.
        headers: rank -> header, for every rank of every member.
        members: the members of the view.
        ranks_per_replica: S.
    """
    at = {member: headers[member * ranks_per_replica + rank % ranks_per_replica] for member in members}
    donor = next((member for member, header in at.items() if not header.taking_over), None)
    return donor if donor is not None and at[donor].digest != headers[rank].digest else None


def _combined(verdicts: Sequence[Verdict], needed: int) -> Verdict:
    first = verdicts[0]
    diverged = tuple(sorted({replica for verdict in verdicts for replica in verdict.diverged}))
    if diverged:
        worst = next(verdict for verdict in verdicts if verdict.diverged)
        donors = [verdict.donor for verdict in verdicts if verdict.diverged and verdict.donor not in diverged]
        return replace(worst, diverged=diverged, donor=donors[0] if donors else worst.donor)
    common = set(first.contributors).intersection(*(verdict.contributors for verdict in verdicts))
    worst = min(verdicts, key=lambda verdict: len(verdict.contributors))
    refused = tuple(sorted({replica for verdict in verdicts for replica in verdict.refused}))
    if len(common) < needed:
        return Verdict(
            (), worst.reason or "too few replicas have usable contributions at every position", refused=refused
        )
    return Verdict(tuple(sorted(common)), worst.reason, donor=first.donor, refused=refused)


def _bare(header: Header, member: int, sample: Contribution) -> Contribution:
    return Contribution(
        round=header.id,
        replica=member,
        codec=sample.codec,
        numel=header.numel,
        payload=_EMPTY,
        weight=header.weight,
        base_weight=header.base_weight,
        digest=header.digest,
        buffers=None if header.buffers is None else _EMPTY.new_empty(header.buffers, device="meta"),
        integers=None if header.integers is None else _EMPTY.new_empty(header.integers, device="meta"),
        withdrawn=header.withdrawn,
    )
