"""What a rank has decided of rounds lately: what it says of them when a view is to end."""

from __future__ import annotations

from diloco.membership.change import Commits, Rounds

__all__ = ["Decided"]

_MOST_VOID = 8
"""Rounds of a fragment that are remembered as void; whoever falls behind by more runs into the round's timeout."""


class Decided:
    """Rounds that are committed, with digests of their averages, and rounds that are void.

    Args:
        void: those that are so when a view begins.

    >>> decided = Decided(frozenset({(0, 1)}))
    >>> decided.call_off((0, 2))
    >>> sorted(decided.void)
    [(0, 1), (0, 2)]
    >>> decided.commit((0, 3), "digest")
    >>> decided.commits, decided.void
    ({(0, 3): 'digest'}, frozenset())
    """

    def __init__(self, void: Rounds = frozenset()) -> None:
        self.commits: Commits = {}
        self.void = void

    def commit(self, key: tuple[int, int], digest: str) -> None:
        """A round, as (fragment, outer step), is applied by all."""
        fragment, outer_step = key
        recent = {k: d for k, d in self.commits.items() if k[0] != fragment or k[1] >= outer_step - 1}
        self.commits = {**recent, key: digest}
        # everybody has contributed to this one, so everybody has done with those before
        self.void = frozenset(k for k in self.void if k[0] != fragment or k[1] > outer_step)

    def call_off(self, key: tuple[int, int]) -> None:
        """A round, as (fragment, outer step), is void for all."""
        newest = sorted(k for k in self.void | {key} if k[0] == key[0])[-_MOST_VOID:]
        self.void = frozenset(k for k in self.void if k[0] != key[0]).union(newest)
