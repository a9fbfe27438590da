"""The disturbances of a peer, and what is done to it at which time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BOOTSTRAP", "ENDS", "RETURNS", "Event", "Rates"]

BOOTSTRAP = -1
"""The number of the bootstrap peer (``diloco dht``), which does not train."""

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

_VERBS = {
    "freeze": ("stop", "continue"),
    "slow": ("stop", "continue"),
    "cut": ("off", "on"),
    "flap": ("off", "on"),
    "mute": ("silence", "hear"),
    "accused": ("silence", "hear"),
    "pair": ("silence", "hear"),
    "clock": ("shift", "set right"),
}
_PULSES_S = {"slow": (0.4, 0.1), "flap": (3.0, 3.0)}  # seconds on and off, alternating


@dataclass(frozen=True)
class Rates:
    """How frequent events are and how long they last.

    Attributes:
        transport: ``hivemind`` or ``torch``. On the latter a signal to one replica stops all, so there are no signals,
            and no peer joins with a new identity.
        silence_s: ``network.silence`` of the peers. They are frozen and cut off for shorter and longer than this.
        gap_s: the mean time between two events while a peer may be disturbed.
        quiet_s: the time without events at the end, in which all peers recover.
        start_s: how long after its start a process does not count as healthy.
        recovery_s: the same for a peer that the others may have continued without.
        hiccup_s: the same for a peer that was disturbed too briefly for that.
        accused_s: how long a third peer receives nothing from two others.
        flap_s: the longest time that a link flaps; at most a fifth of the run.
        can_cut: whether each peer has its own network, so that links can be cut.
    """

    transport: str = "hivemind"
    silence_s: float = 8.0
    gap_s: float = 8.0
    quiet_s: float = 60.0
    start_s: float = 30.0
    recovery_s: float = 15.0
    hiccup_s: float = 4.0
    accused_s: float = 14.0
    flap_s: float = 180.0
    can_cut: bool = False

    @property
    def weights(self) -> dict[str, float]:
        """The kinds of events that are possible, and their relative frequencies."""
        missing = (*(() if self.can_cut else _OF_LINKS), *(_OF_A_SWARM if self.transport == "torch" else ()))
        return {kind: weight for kind, weight in _WEIGHTS.items() if kind not in missing}


@dataclass(frozen=True, order=True)
class Event:
    """One disturbance, or the return of a peer.

    Attributes:
        at_s: seconds since all peers train.
        kind: ``kill`` (SIGKILL), ``leave`` (SIGINT), ``group SIGINT``, ``group SIGTERM`` (to its process group),
            ``freeze`` (SIGSTOP), ``slow`` (frozen most of the time), ``cut`` (no packet reaches or leaves it), ``mute``
            (its packets don't reach one other peer), ``accused`` (the packets of two others don't reach it), ``pair``
            (no packet passes between it and one other peer), ``flap`` (cut off for 3 s, connected for 3 s,
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
        """A description of the event.

        >>> Event(1.0, "freeze", 2, 3.5, True).text
        'freeze for 3.5 s, with its daemon'
        >>> Event(1.0, "accused", 3, 14.0, others=(0, 1)).text
        'accused: receives nothing from 0 and 1 for 14.0 s'
        """
        named = " and ".join(map(str, self.others))
        words = {
            "mute": f"mute towards {named}",
            "accused": f"accused: receives nothing from {named}",
            "pair": f"pair with {named}",
        }.get(self.kind, self.kind)
        if self.clock_s:
            words += f" {self.clock_s:+.0f} s" if self.kind == "clock" else f", its clock {self.clock_s:+.0f} s"
        words += f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{words}, with its daemon" if self.with_daemon else words

    @property
    def stalls(self) -> tuple[int, ...]:
        """The peers that it may stall or evict; no other peer may be affected.

        If a pair can't communicate, either of the two may be evicted. A peer that does not receive from two others is
        evicted itself, and they stay. A wrong clock may affect no peer.

        >>> Event(1.0, "mute", 2, 3.5, others=(4,)).stalls, Event(1.0, "accused", 3, 14.0, others=(0, 1)).stalls
        ((2, 4), (3,))
        """
        if self.peer == BOOTSTRAP or self.kind == "clock":
            return ()
        return (self.peer, *self.others) if self.kind in ("mute", "pair") else (self.peer,)

    @property
    def silenced(self) -> tuple[tuple[int, int], ...]:
        """The links on which all packets are lost, as (from, to).

        >>> Event(1.0, "pair", 0, 3.5, others=(4,)).silenced
        ((0, 4), (4, 0))
        """
        out = tuple((self.peer, other) for other in self.others)
        back = tuple((other, self.peer) for other in self.others)
        return {"mute": out, "accused": back, "pair": out + back}.get(self.kind, ())

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
