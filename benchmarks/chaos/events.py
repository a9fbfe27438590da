"""What can befall a peer, and what is done to it when."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BOOTSTRAP", "ENDS", "RETURNS", "Event", "Rates"]

BOOTSTRAP = -1
"""In the place of a peer's number: the standing peer that trains nothing."""

ENDS = ("kill", "leave", "group SIGINT", "group SIGTERM")
"""What ends a process."""

RETURNS = ("resume", "join")
"""What starts one."""

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
_PULSES_S = {"slow": (0.4, 0.1), "flap": (3.0, 3.0)}  # begun and let be, in turns


@dataclass(frozen=True)
class Rates:
    """How often what happens, and how long it takes.

    Attributes:
        transport: of the run, ``hivemind`` or ``torch``; on the latter a signal to one replica stops all, so there are
            none, and no peer with another identity.
        silence_s: of the peers; they are frozen and cut off for shorter and for longer than this.
        gap_s: mean time between two events, where there is anybody to be disturbed.
        quiet_s: without events at the end, so that all who come back are there.
        start_s: after its start a process does not count as healthy for so long.
        recovery_s: nor does a peer that the others may have gone on without.
        hiccup_s: nor one that was frozen too shortly for that.
        accused_s: two peers are not heard by a third for so long.
        flap_s: the longest that a link flaps; no longer than a fifth of the run.
        can_cut: whether peers have a network of their own.
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
        """The kinds of events that there can be, and how often they are relative to each other."""
        missing = (*(() if self.can_cut else _OF_LINKS), *(_OF_A_SWARM if self.transport == "torch" else ()))
        return {kind: weight for kind, weight in _WEIGHTS.items() if kind not in missing}


@dataclass(frozen=True, order=True)
class Event:
    """One disturbance, or the return of a peer.

    Attributes:
        at_s: since all peers train.
        kind: ``kill`` (SIGKILL), ``leave`` (SIGINT), ``group SIGINT``, ``group SIGTERM`` (to its process group),
            ``freeze`` (SIGSTOP), ``slow`` (frozen most of the time), ``cut`` (no packet gets to it or from it),
            ``mute`` (no packet gets from it to another one), ``accused`` (none gets to it from two others), ``pair``
            (none gets through between it and another one), ``flap`` (cut off for 3 s, reached for 3 s, in turns),
            ``clock`` (its clock is wrong); ``resume`` (started again in its folder), ``join`` (another one in its
            place); ``kill bootstrap``, ``start bootstrap``; ``thaw at the end`` (frozen shortly before the others end,
            and let run as they do).
        peer: its place, from 0; `BOOTSTRAP`.
        seconds: until it is thawed, let run or reached again.
        with_daemon: a freeze or kill that its network daemon shares, as when a whole machine goes.
        others: with whom it can't speak.
        clock_s: what its clock is off by; of a ``join``, that of the one who comes, until it ends.
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
        """In words.

        >>> Event(1.0, "freeze", 2, 3.5, True).text
        'freeze for 3.5 s, with its daemon'
        >>> Event(1.0, "accused", 3, 14.0, others=(0, 1)).text
        'accused: 0 and 1 are not heard, for 14.0 s'
        """
        named = " and ".join(map(str, self.others))
        words = {
            "mute": f"mute towards {named},",
            "accused": f"accused: {named} are not heard,",
            "pair": f"pair with {named}",
        }.get(self.kind, self.kind)
        if self.clock_s:
            words += f" {self.clock_s:+.0f} s" if self.kind == "clock" else f", its clock {self.clock_s:+.0f} s"
        words += f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{words}, with its daemon" if self.with_daemon else words

    @property
    def stalls(self) -> tuple[int, ...]:
        """Whom it may keep from training: nobody else.

        Of a pair that can't speak either one may be the one to go; who does not hear two others goes itself, and they
        stay. A clock that is wrong keeps nobody from anything.

        >>> Event(1.0, "mute", 2, 3.5, others=(4,)).stalls, Event(1.0, "accused", 3, 14.0, others=(0, 1)).stalls
        ((2, 4), (3,))
        """
        if self.peer == BOOTSTRAP or self.kind == "clock":
            return ()
        return (self.peer, *self.others) if self.kind in ("mute", "pair") else (self.peer,)

    @property
    def silenced(self) -> tuple[tuple[int, int], ...]:
        """The ways that no packet gets through: from, to.

        >>> Event(1.0, "pair", 0, 3.5, others=(4,)).silenced
        ((0, 4), (4, 0))
        """
        out = tuple((self.peer, other) for other in self.others)
        back = tuple((other, self.peer) for other in self.others)
        return {"mute": out, "accused": back, "pair": out + back}.get(self.kind, ())

    @property
    def timetable(self) -> tuple[tuple[float, str], ...]:
        """What is done, and how many seconds after the event begins; empty for what is done once.

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
        """When those that it may stall count as healthy again; None: not before another event."""
        if self.kind in ENDS or self.kind == "thaw at the end":
            return None
        if self.kind in RETURNS:
            return self.at_s + rates.start_s
        if self.kind in ("slow", "flap") or self.seconds > rates.silence_s / 2:
            return self.at_s + self.seconds + rates.recovery_s
        return self.at_s + self.seconds + rates.hiccup_s
