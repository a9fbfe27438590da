"""How rounds go, as all of a rank's parts that deal with them are told; and the words for who breaks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.algorithm.averaging import RoundId

__all__ = ["Rules", "expired_words", "late_words"]


@dataclass(frozen=True)
class Rules:
    """How rounds go.

    Attributes:
        rank, replica: mine.
        ranks_per_replica: S.
        min_contributors: None: all that have the state.
        round_timeout_s: from my contribution to my vote, in however many views.
        piece_bytes: about how large a piece of a payload is.
        late_s: whoever has not contributed to a round this long after I have, or has contributed and says nothing at
            all for so long while its vote is waited for, counts as lost; None: never.
    """

    rank: int
    replica: int
    ranks_per_replica: int
    min_contributors: int | None
    round_timeout_s: float
    piece_bytes: int
    late_s: float | None = None


def late_words(round_id: RoundId, absent: frozenset[int], silent: frozenset[int], late_s: float) -> str:
    """Why replicas are given up.

    >>> late_words(RoundId(0, 3), frozenset({1}), frozenset({2}), 5.0)
    'replica 1 is late: no contribution to fragment 0, outer step 3 came within 5 s; replica 2 is late: no vote on \
fragment 0, outer step 3 and nothing else came within 5 s'
    """
    waited_for = [(absent, f"no contribution to {round_id}"), (silent, f"no vote on {round_id} and nothing else")]
    return "; ".join(
        f"{_names(late)} {'are' if len(late) > 1 else 'is'} late: {what} came within {late_s:g} s"
        for late, what in waited_for
        if late
    )


def expired_words(missing: Sequence[int], rules: Rules) -> str:
    """Why a rank votes against a round that took too long; ``missing``: replicas whose contributions did not come.

    >>> expired_words((1, 2), Rules(0, 0, 1, None, 5.0, 1 << 19))
    'nothing was heard of replica 1, 2 within 5 s (replica 0 waited)'
    """
    waited_for = f"replica {', '.join(map(str, missing))}" if missing else "the payloads"
    return f"nothing was heard of {waited_for} within {rules.round_timeout_s:g} s (replica {rules.replica} waited)"


def _names(replicas: frozenset[int]) -> str:
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, sorted(replicas)))}"
