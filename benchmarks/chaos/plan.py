"""The disturbances of a run, a pure function of a seed: what is done to which peer at which time."""

import random
from dataclasses import dataclass, field

BOOTSTRAP = -1
"""The number of the bootstrap peer (``diloco relay``), which does not train."""

ENDS = ("kill", "leave", "group SIGINT", "group SIGTERM")
"""The kinds of events that end a process."""

RETURNS = ("resume", "join")
"""The kinds of events that start one."""

_OF_LINKS = ("cut", "mute", "accused", "pair", "flap")
_OF_A_SWARM = ("leave", "group SIGINT", "group SIGTERM", "kill bootstrap")

_WEIGHTS = {
    "kill": 3.0,
    "freeze": 3.5,
    "leave": 1.5,
    "slow": 1.0,
    "cut": 2.0,
    "mute": 4.0,
    "accused": 1.5,
    "pair": 4.0,
    "flap": 0.7,
    "clock": 1.5,
    "group SIGINT": 0.8,
    "group SIGTERM": 0.8,
    "kill bootstrap": 0.7,
}

_ON_REQUEST = {"refuse": 1.0}
"""Kinds that happen only where `Rates.kinds` names them."""

_VERBS = {
    "freeze": ("stop", "continue"),
    "slow": ("stop", "continue"),
    "cut": ("off", "on"),
    "flap": ("off", "on"),
    "mute": ("silence", "hear"),
    "accused": ("silence", "hear"),
    "pair": ("silence", "hear"),
    "refuse": ("refuse", "admit"),
    "clock": ("shift", "set right"),
}
_PULSES_S = {"slow": (0.4, 0.1), "flap": (3.0, 3.0)}  # seconds on and off, alternating


@dataclass(frozen=True)
class Rates:
    """How frequent events are and how long they last, in seconds.

    Attributes:
        transport: on ``tcp`` a signal to one replica stops all, so there are no signals, and no new identities join.
        silence_s: that of the peers. They are frozen and cut off for shorter and longer than this.
        gap_s: the mean time between two events while a peer may be disturbed.
        quiet_s: the time without events at the end, in which all peers recover.
        start_s, recovery_s, hiccup_s: how long a process does not count as healthy after its start, after a disturbance
            that the others may have continued without it, and after a shorter one.
        can_cut: whether links can be cut.
        kinds: the only kinds of events that happen; empty: all but those of `_ON_REQUEST`.
    """

    transport: str = "swarm"
    silence_s: float = 8.0
    gap_s: float = 8.0
    quiet_s: float = 60.0
    start_s: float = 30.0
    recovery_s: float = 15.0
    hiccup_s: float = 4.0
    accused_s: float = 14.0
    flap_s: float = 180.0
    can_cut: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def weights(self) -> dict[str, float]:
        """The kinds of events that are possible, and their relative frequencies."""
        if self.kinds:
            return {kind: (_WEIGHTS | _ON_REQUEST)[kind] for kind in self.kinds}
        missing = (*(() if self.can_cut else _OF_LINKS), *(_OF_A_SWARM if self.transport == "tcp" else ()))
        return {kind: weight for kind, weight in _WEIGHTS.items() if kind not in missing}


@dataclass(frozen=True, order=True)
class Event:
    """One disturbance, or the return of a peer.

    Attributes:
        at_s: seconds since all peers train.
        kind: ``kill`` (SIGKILL), ``leave`` (SIGINT), ``group SIGINT``, ``group SIGTERM`` (to its process group),
            ``freeze`` (SIGSTOP), ``slow`` (frozen most of the time), ``cut`` (no packet reaches or leaves it), ``mute``
            (its packets don't reach one other peer), ``accused`` (the packets of two others don't reach it), ``pair``
            (no packet passes between it and one other peer), ``refuse`` (a router answers for either of the two that
            nothing listens there), ``flap`` (cut off for 3 s, connected for 3 s,
            alternating), ``clock`` (its clock is wrong); ``resume`` (restarted in its folder), ``join`` (replaced by a
            new peer); ``kill bootstrap``, ``start bootstrap``; ``thaw at the end`` (frozen shortly before the others
            finish, and thawed as they do).
        peer: the number of its place, from 0, or `BOOTSTRAP`.
        seconds: how long the disturbance lasts.
        with_daemon: whether a freeze or kill includes its network daemon, as when a whole machine fails.
        others: the peers at the other end of the disturbed links.
        clock_s: the offset of its clock; of a ``join``, the offset of the new peer's clock until it ends.
    """

    at_s: float
    kind: str
    peer: int
    seconds: float = 0.0
    with_daemon: bool = False
    others: tuple[int, ...] = ()
    clock_s: float = 0.0

    @property
    def text(self) -> str:
        """A description of the event."""
        named = " and ".join(map(str, self.others))
        words = {
            "mute": f"mute towards {named}",
            "accused": f"accused: receives nothing from {named}",
            "pair": f"pair with {named}",
            "refuse": f"refused by {named}, and the other way round",
        }.get(self.kind, self.kind)
        if self.clock_s:
            words += f" {self.clock_s:+.0f} s" if self.kind == "clock" else f", its clock {self.clock_s:+.0f} s"
        words += f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{words}, with its daemon" if self.with_daemon else words

    @property
    def stalls(self) -> tuple[int, ...]:
        """The peers that it may stall or evict: either of a pair that can't communicate; none, if a clock is wrong."""
        if self.peer == BOOTSTRAP or self.kind == "clock":
            return ()
        return (self.peer, *self.others) if self.kind in ("mute", "pair", "refuse") else (self.peer,)

    @property
    def silenced(self) -> tuple[tuple[int, int], ...]:
        """The links on which all packets are lost, as (from, to)."""
        out = tuple((self.peer, other) for other in self.others)
        back = tuple((other, self.peer) for other in self.others)
        return {"mute": out, "accused": back, "pair": out + back, "refuse": out + back}.get(self.kind, ())

    @property
    def timetable(self) -> tuple[tuple[float, str], ...]:
        """The actions and their times in seconds after the begin of the event; empty for an event that is one action.

        >>> Event(1.0, "flap", 0, 8.0).timetable
        ((0.0, 'off'), (3.0, 'on'), (6.0, 'off'), (8.0, 'on'))
        """
        if self.kind not in _VERBS:
            return ()
        begin, end = _VERBS[self.kind]
        on_s, off_s = _PULSES_S.get(self.kind, (self.seconds, 0.0))
        done: list[tuple[float, str]] = []
        while (at_s := len(done) // 2 * (on_s + off_s)) < self.seconds:
            done += [(round(at_s, 3), begin), (round(min(at_s + on_s, self.seconds), 3), end)]
        return tuple(done)

    def healthy_again_s(self, rates: Rates) -> float | None:
        """Return when the peers it may stall count as healthy again, or None if that needs another event."""
        if self.kind in ENDS or self.kind == "thaw at the end":
            return None
        if self.kind in RETURNS:
            return self.at_s + rates.start_s
        if self.kind in ("slow", "flap") or self.seconds > rates.silence_s / 2:
            return self.at_s + self.seconds + rates.recovery_s
        return self.at_s + self.seconds + rates.hiccup_s


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
        needed = {"mute": 2, "pair": 2, "refuse": 2, "accused": 3}.get(kind, 1)
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
                kinds = ("resume",) if self.rates.transport == "tcp" else ("resume", "resume", "join")
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
