"""Losses, their detection, returns and downloads of joiners, drawn independently of the rounds."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigurationError

__all__ = ["Churn", "Membership", "ViewChange", "void_probability"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Churn:
    """How replicas fail and return.

    Attributes:
        mtbf_s: the mean time between failures of one replica, exponential.
        away_s: the mean time until its process runs again, exponential.
        silence_s: the time after which a silent replica counts as lost.
        silent_share: the share of losses noticed by silence; the others are noticed at once, by their connections.
        view_change_s: the time from the notice until payloads can travel again: reports, and connections between all
            members.
        state_share: the share of a link that a joiner's download gets; the donor's payloads have the rest meanwhile.
        donors: the donor of a joiner: the first member, or the one that is free first. A joiner has one donor at a
            time; in the trainer it has several.
        refetch: whether a joiner fetches a fragment that has changed since its download again in its own merge, while
            the others wait for it, as until 0.4.0; since then it does so while it trains.
        seed: the seed of the draws.

    Raises:
        ConfigurationError: if a value is out of range.
    """

    mtbf_s: float = math.inf
    away_s: float = 600.0
    silence_s: float = 15.0
    silent_share: float = 0.5
    view_change_s: float = 0.5
    state_share: float = 0.5
    donors: Literal["first", "spread"] = "first"
    refetch: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        times = (self.away_s, self.silence_s, self.view_change_s)
        fits = self.mtbf_s > 0 and all(0 <= time_s < math.inf for time_s in times) and 0 < self.state_share < 1
        if not fits or not 0 <= self.silent_share <= 1 or self.donors not in ("first", "spread"):
            raise ConfigurationError(
                "Times must be at least 0 s, mtbf_s above 0, state_share between 0 and 1 (exclusive), silent_share "
                f"from 0 to 1, and donors 'first' or 'spread', got {self}. Nothing was computed."
            )


def void_probability(members: float, round_s: float, churn: Churn, *, overlap_s: float = math.inf) -> float:
    """Return the probability that a round of ``round_s`` is void if as many replicas join as are lost, one by one.

    ``1 - exp(-(M / mtbf) * (2 * round_s + silent_share * min(silence_s, overlap_s)))``: there is a loss or a join
    during the round, or an unnoticed loss before it. After a loss rounds are sent for at most ``overlap_s``, the time
    of tau inner steps, because then the first merge waits for the notice.
    """
    unnoticed_s = churn.silent_share * min(churn.silence_s, overlap_s)
    return -math.expm1(-members / churn.mtbf_s * (2 * round_s + unnoticed_s))


class ViewChange(NamedTuple):
    """The end of a view: the time of the notice, that of the cause (no later round is committed), and the replica."""

    notice_s: float
    cause_s: float
    replica: int
    joins: bool


class Membership:
    """The members over time. Changes are drawn up to any time, and take effect when they are noticed."""

    def __init__(self, churn: Churn, bandwidth_bits_per_s: Floats, state_bytes: float) -> None:
        self.churn, self.bandwidth, self.state_bytes = churn, bandwidth_bits_per_s, state_bytes
        number = len(bandwidth_bits_per_s)
        self.random = np.random.default_rng(churn.seed)
        self.running = np.ones(number, dtype=bool)
        self.serves_from_s, self.serves_until_s, self.fetched_s = np.zeros(number), np.zeros(number), np.zeros(number)
        self.pending: list[ViewChange] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, Literal["fail", "return", "join"], int]] = []
        if math.isfinite(churn.mtbf_s):
            for replica, time_s in enumerate(self.random.exponential(churn.mtbf_s, number)):
                self.expect(float(time_s), "fail", replica)

    def draw(self, until_s: float) -> None:
        """Draw all changes whose cause is not later than ``until_s``."""
        while self._events and self._events[0][0] <= until_s:
            time_s, _, kind, replica = heapq.heappop(self._events)
            if kind == "fail":
                self.running[replica] = False
                self.serves_until_s[replica] = min(time_s, float(self.serves_until_s[replica]))
                silent = self.random.random() < self.churn.silent_share
                notice_s = time_s + silent * self.churn.silence_s
                heapq.heappush(self.pending, ViewChange(notice_s, time_s, replica, joins=False))
                self.expect(max(notice_s, time_s + self.random.exponential(self.churn.away_s)), "return", replica)
            elif kind == "return":
                self._download(replica, time_s)
            else:
                self.running[replica] = True
                heapq.heappush(self.pending, ViewChange(time_s, time_s, replica, joins=True))

    def expect(self, time_s: float, kind: Literal["fail", "return", "join"], replica: int) -> None:
        """Let a replica fail, return, or join with the state that it has fetched, at ``time_s``."""
        heapq.heappush(self._events, (time_s, next(self._order), kind, replica))

    def void_at_s(self, committed_s: float) -> float:
        """Return when a round to be committed at ``committed_s`` turns out to be void; infinite if it does not."""
        self.draw(committed_s)
        if not any(change.cause_s < committed_s for change in self.pending):
            return math.inf
        self.draw(self.pending[0].notice_s)  # a join before that notice ends the view as well
        return self.pending[0].notice_s

    def next_event_s(self) -> float:
        """Return the time of the next return, join or failure."""
        return self._events[0][0]

    def serves_at(self, time_s: float) -> NDArray[np.bool_]:
        """Return, by replica, whether it is sending its state to a joiner at ``time_s``."""
        return (self.serves_from_s <= time_s) & (time_s < self.serves_until_s)

    def transfer_s(self, replica: int, donor: int, state_bytes: float) -> float:
        """Return the duration of a download."""
        return 8 * state_bytes / (self.churn.state_share * float(min(self.bandwidth[[replica, donor]])))

    def _download(self, replica: int, time_s: float) -> None:
        """Download the state from a donor; if no replica is running, continue from the replica's own checkpoint.

        A replica that fails during its download returns later. If the donor is lost, the download continues from
        another one and takes no longer.
        """
        fails_s = time_s + self.random.exponential(self.churn.mtbf_s)
        begin_s = ready_s = time_s
        donors = np.flatnonzero(self.running)
        if len(donors):
            spread = self.churn.donors == "spread"
            donor = int(donors[np.argmin(self.serves_until_s[donors])] if spread else donors[0])
            begin_s = max(time_s, float(self.serves_until_s[donor]))
            ready_s = begin_s + self.transfer_s(replica, donor, self.state_bytes)
            if begin_s > self.serves_until_s[donor]:
                self.serves_from_s[donor] = begin_s
            self.serves_until_s[donor] = max(float(self.serves_until_s[donor]), min(ready_s, fails_s))
        self.fetched_s[replica] = begin_s
        if fails_s < ready_s:
            self.expect(fails_s + self.random.exponential(self.churn.away_s), "return", replica)
        else:
            self.expect(ready_s, "join", replica)
            self.expect(fails_s, "fail", replica)
