"""The plan of events, a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.events import BOOTSTRAP, ENDS, Event, Rates

__all__ = ["fewest_healthy", "least_healthy", "plan_events"]

_NEW = 4.0  # a kind that has not happened yet is this many times as likely
_HOUR_S = 3600.0
_CLOCK_S = (30.0, 90.0)


@dataclass
class _Place:
    """The state of one peer's place while planning."""

    healthy_s: float | None = 0.0
    down_until_s: float = 0.0

    def is_healthy(self, at_s: float) -> bool:
        return self.healthy_s is not None and self.healthy_s <= at_s


@dataclass
class _Planner:
    rng: random.Random
    rates: Rates
    places: list[_Place]
    allowed: int
    bootstrap_down_until_s: float | None = None
    clocks_right_s: float = 0.0
    events: list[Event] = field(default_factory=list)

    def unhealthy(self, at_s: float) -> int:
        return sum(not place.is_healthy(at_s) for place in self.places)

    def add(self, event: Event) -> None:
        self.events.append(event)
        for peer in event.stalls:
            place = self.places[peer]
            place.healthy_s = event.healthy_again_s(self.rates)
            if place.healthy_s is None:
                place.down_until_s = event.at_s + self.rng.uniform(1, 1.5 * self.rates.silence_s)

    def disturb(self, at_s: float, end_s: float) -> None:
        """Add a random event for healthy peers, unless it would disturb too many at once."""
        weights, happened = self.rates.weights, {event.kind for event in self.events}
        kinds = list(weights)
        kind = self.rng.choices(kinds, [weights[each] * (1 if each in happened else _NEW) for each in kinds])[0]
        if kind == "kill bootstrap":
            if self.bootstrap_down_until_s is None:
                self.bootstrap_down_until_s = at_s + self.rng.uniform(5, 40)
                self.add(Event(at_s, kind, BOOTSTRAP))
            return
        healthy = [number for number, place in enumerate(self.places) if place.is_healthy(at_s)]
        drawn = self.rng.sample(healthy, min(3, len(healthy)))
        needed = {"mute": 2, "pair": 2, "accused": 3}.get(kind, 1)
        if len(drawn) < needed:
            return
        event = self.draw(Event(at_s, kind, drawn[0], others=tuple(sorted(drawn[1:needed]))), end_s)
        busy = kind == "clock" and at_s < self.clocks_right_s
        if not busy and self.unhealthy(at_s) + len(event.stalls) <= self.allowed:
            self.clocks_right_s = at_s + event.seconds if kind == "clock" else self.clocks_right_s
            self.add(event)

    def draw(self, event: Event, end_s: float) -> Event:
        """Return the event with random values for its duration, daemon and clock, according to its kind."""
        rng, rates, kind = self.rng, self.rates, event.kind
        with_daemon = kind in ("kill", "freeze") and rng.random() < 0.5
        shorter = rng.random() < 0.4
        least, most = (0.1, 0.8) if shorter else (1.2, 2.5)
        span_s = {
            "slow": (0.5 * rates.silence_s, 1.5 * rates.silence_s),
            "accused": (rates.accused_s, rates.accused_s),
            "flap": (min(30.0, end_s / 5), min(rates.flap_s, end_s / 5)),
            "clock": _CLOCK_S,
        }.get(kind, (least * rates.silence_s, most * rates.silence_s))
        seconds = 0.0 if kind in ENDS else round(min(rng.uniform(*span_s), end_s - event.at_s), 1)
        clock_s = rng.choice((-_HOUR_S, _HOUR_S)) if kind == "clock" else 0.0
        return Event(event.at_s, kind, event.peer, seconds, with_daemon, event.others, clock_s)

    def bring_back(self, at_s: float) -> bool:
        """Restart one process that has been down for long enough, and return whether there was one."""
        if self.bootstrap_down_until_s is not None and self.bootstrap_down_until_s <= at_s:
            self.bootstrap_down_until_s = None
            self.add(Event(at_s, "start bootstrap", BOOTSTRAP))
            return True
        for number, place in enumerate(self.places):
            if place.healthy_s is None and place.down_until_s <= at_s:
                kinds = ("resume",) if self.rates.transport == "torch" else ("resume", "resume", "join")
                kind = self.rng.choice(kinds)
                off = kind == "join" and self.rng.random() < 0.5
                self.add(Event(at_s, kind, number, clock_s=self.rng.choice((-60.0, 600.0)) if off else 0.0))
                return True
        return False


def least_healthy(peers: int) -> int:
    """Return how many of ``peers`` stay alive and healthy at any time: at least three, and always more than half.

    >>> [least_healthy(peers) for peers in (4, 5, 6)]
    [3, 3, 4]
    """
    return max(3, peers // 2 + 1)


def plan_events(seed: int, minutes: float, peers: int, rates: Rates | None = None) -> tuple[Event, ...]:
    """Return the events of ``minutes`` minutes with ``peers`` peers, in order.

    At least `least_healthy` peers are alive and healthy at any time, and all of them are before the last event, which
    freezes one and thaws it as the others finish.

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
    planner.add(Event(60 * minutes, "thaw at the end", planner.rng.randrange(peers), with_daemon=True))
    return tuple(planner.events)


def fewest_healthy(events: Sequence[Event], peers: int, rates: Rates) -> int:
    """Return the least number of peers that are alive and healthy at the same time according to the plan."""
    healthy: dict[int, float | None] = dict.fromkeys(range(peers), 0.0)
    fewest = peers
    for event in events:
        healthy |= dict.fromkeys(event.stalls, event.healthy_again_s(rates))
        fewest = min(fewest, sum(since is not None and since <= event.at_s for since in healthy.values()))
    return fewest
