"""What befalls whom, and when: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["BOOTSTRAP", "Event", "Rates", "fewest_healthy", "least_healthy", "plan_events"]

BOOTSTRAP = -1
"""In the place of a peer's number: the standing peer that trains nothing."""

_WEIGHTS: Mapping[str, float] = {
    "kill": 3,
    "freeze": 4,
    "leave": 2,
    "slow": 1.5,
    "cut": 3,
    "kill bootstrap": 0.7,
}
_ENDS = ("kill", "leave")


@dataclass(frozen=True)
class Rates:
    """How long what happens takes.

    Attributes:
        silence_s: of the peers; they are frozen and cut off for shorter and for longer than this.
        gap_s: mean time between two events, where there is anybody to be disturbed.
        quiet_s: without events at the end, so that all who come back are there.
        start_s: after its start a process does not count as healthy for so long.
        recovery_s: nor does a peer that the others may have gone on without.
        hiccup_s: nor one that was frozen too shortly for that.
        can_cut: whether peers have a network of their own.
    """

    silence_s: float = 8.0
    gap_s: float = 8.0
    quiet_s: float = 60.0
    start_s: float = 30.0
    recovery_s: float = 15.0
    hiccup_s: float = 4.0
    can_cut: bool = False


@dataclass(frozen=True, order=True)
class Event:
    """One disturbance, or the return of a peer.

    Attributes:
        at_s: since all peers train.
        kind: ``kill`` (SIGKILL), ``leave`` (SIGINT), ``freeze`` (SIGSTOP), ``slow`` (frozen most of the time), ``cut``
            (no packet gets to it or from it); ``resume`` (started again in its folder), ``join`` (another one in its
            place); ``kill bootstrap``, ``start bootstrap``.
        peer: its place, from 0; `BOOTSTRAP`.
        seconds: until it is thawed, let run or reached again.
        with_daemon: a freeze or kill that its network daemon shares, as when a whole machine goes.
    """

    at_s: float
    kind: str
    peer: int
    seconds: float = 0.0
    with_daemon: bool = False

    @property
    def text(self) -> str:
        """In words.

        >>> Event(1.0, "freeze", 2, 3.5, True).text
        'freeze for 3.5 s, with its daemon'
        """
        words = f"{self.kind} for {self.seconds:.1f} s" if self.seconds else self.kind
        return f"{words}, with its daemon" if self.with_daemon else words

    def healthy_again_s(self, rates: Rates) -> float | None:
        """When its peer counts as healthy again; None: not before another event."""
        if self.kind in _ENDS:
            return None
        if self.kind in ("resume", "join"):
            return self.at_s + rates.start_s
        if self.kind == "slow" or self.seconds > rates.silence_s / 2:
            return self.at_s + self.seconds + rates.recovery_s
        return self.at_s + self.seconds + rates.hiccup_s


@dataclass
class _Place:
    """One peer's place while planning."""

    healthy_s: float | None = 0.0
    down_until_s: float = 0.0


@dataclass
class _Planner:
    rng: random.Random
    rates: Rates
    places: list[_Place]
    allowed: int
    bootstrap_down_until_s: float | None = None
    events: list[Event] = field(default_factory=list)

    def unhealthy(self, at_s: float) -> int:
        return sum(place.healthy_s is None or place.healthy_s > at_s for place in self.places)

    def add(self, event: Event) -> None:
        self.events.append(event)
        if event.peer == BOOTSTRAP:
            return
        place = self.places[event.peer]
        place.healthy_s = event.healthy_again_s(self.rates)
        if place.healthy_s is None:
            place.down_until_s = event.at_s + self.rng.uniform(1, 1.5 * self.rates.silence_s)

    def disturb(self, at_s: float, end_s: float) -> None:
        """Something that befalls a healthy peer, if one more may be disturbed."""
        rng, rates = self.rng, self.rates
        healthy = [number for number, place in enumerate(self.places) if place.healthy_s is not None]
        healthy = [number for number in healthy if (self.places[number].healthy_s or 0.0) <= at_s]
        kinds = [kind for kind in _WEIGHTS if kind != "cut" or rates.can_cut]
        kind = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        if kind == "kill bootstrap":
            if self.bootstrap_down_until_s is None:
                self.bootstrap_down_until_s = at_s + rng.uniform(5, 40)
                self.add(Event(at_s, kind, BOOTSTRAP))
            return
        if self.unhealthy(at_s) >= self.allowed or not healthy:
            return
        peer = rng.choice(healthy)
        if kind in _ENDS:
            self.add(Event(at_s, kind, peer, with_daemon=kind == "kill" and rng.random() < 0.5))
            return
        least, most = ((0.1, 0.8) if rng.random() < 0.4 else (1.2, 2.5)) if kind != "slow" else (0.5, 1.5)
        seconds = round(min(rng.uniform(least, most) * rates.silence_s, end_s - at_s), 1)
        self.add(Event(at_s, kind, peer, seconds, with_daemon=kind == "freeze" and rng.random() < 0.5))

    def bring_back(self, at_s: float) -> bool:
        """Start what was down for long enough; whether there was anything."""
        if self.bootstrap_down_until_s is not None and self.bootstrap_down_until_s <= at_s:
            self.bootstrap_down_until_s = None
            self.add(Event(at_s, "start bootstrap", BOOTSTRAP))
            return True
        for number, place in enumerate(self.places):
            if place.healthy_s is None and place.down_until_s <= at_s:
                self.add(Event(at_s, self.rng.choice(("resume", "resume", "join")), number))
                return True
        return False


def least_healthy(peers: int) -> int:
    """How many of ``peers`` are alive and healthy at any time: at least three, and always more than half.

    >>> [least_healthy(peers) for peers in (4, 5, 6)]
    [3, 3, 4]
    """
    return max(3, peers // 2 + 1)


def plan_events(seed: int, minutes: float, peers: int, rates: Rates | None = None) -> tuple[Event, ...]:
    """What happens in ``minutes`` to ``peers`` peers, in order.

    Never are fewer than `least_healthy` alive and healthy, and all are by the end.

    >>> plan_events(7, 15, 5) == plan_events(7, 15, 5)
    True
    """
    rates = rates or Rates()
    end_s = 60 * minutes - rates.quiet_s
    places = [_Place() for _ in range(peers)]
    planner = _Planner(random.Random(seed), rates, places, peers - least_healthy(peers))
    at_s = 0.0
    while (at_s := round(at_s + planner.rng.uniform(0.5, 1.5) * rates.gap_s, 1)) < end_s:
        if not planner.bring_back(at_s):
            planner.disturb(at_s, end_s)
    for place in places:
        place.down_until_s = 0.0
    planner.bootstrap_down_until_s = None if planner.bootstrap_down_until_s is None else 0.0
    while planner.bring_back(round(end_s, 1)):
        pass
    return tuple(planner.events)


def fewest_healthy(events: Sequence[Event], peers: int, rates: Rates) -> int:
    """The least number of peers that are alive and healthy at once, as planned."""
    healthy: dict[int, float | None] = dict.fromkeys(range(peers), 0.0)
    fewest = peers
    for event in events:
        if event.peer == BOOTSTRAP:
            continue
        healthy[event.peer] = event.healthy_again_s(rates)
        fewest = min(fewest, sum(since is not None and since <= event.at_s for since in healthy.values()))
    return fewest
