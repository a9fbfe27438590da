"""Who founds a swarm, of those who look for one at the same time. Pure: records and times in, an answer out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.transport.hivemind.records import PeerRecord

__all__ = ["Founding", "Lookers"]


@dataclass(frozen=True)
class _Heard:
    beat: int
    since_s: float


class Lookers:
    """Those who look for the swarm, too. One that has ended while it looked is forgotten: its record stays for half an
    hour, and who waits for it would wait in vain.

    Who looks stores its record again and again, with another beat each time. How often it changes is seen here, so no
    clock is compared with another machine's.

    Args:
        silence_s: one whose beat stays the same for so long has ended.

    >>> lookers = Lookers(silence_s=30.0)
    >>> one = PeerRecord("Qm", number=1, held_step=100)
    >>> [len(lookers.hear([one], now_s)) for now_s in (0.0, 29.0, 31.0)]
    [1, 1, 0]
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, _Heard] = {}

    def hear(self, records: Sequence[PeerRecord], now_s: float) -> tuple[PeerRecord, ...]:
        """Those of ``records`` who look, as far as is known at ``now_s``."""
        looking = [record for record in records if not record.swarm]
        for record in looking:
            heard = self._heard.get(record.peer_id)
            if heard is None or heard.beat != record.beat:
                self._heard[record.peer_id] = _Heard(record.beat, now_s)
        return tuple(each for each in looking if now_s - self._heard[each.peer_id].since_s < self._silence_s)


@dataclass(frozen=True, kw_only=True)
class Founding:
    """What one peer brings to the question.

    Attributes:
        number: of its replica.
        held_step: the newest step that it could resume from; -1 for none.
        was_member: of a swarm that it has lost; it comes back to that one, or to none.
        alone: it knows of nobody to ask.
        window_s: so long it waits for others that look, too.
    """

    number: int
    held_step: int
    was_member: bool
    alone: bool
    window_s: float

    def founds(self, records: Sequence[PeerRecord], lookers: Sequence[PeerRecord], waited_s: float) -> bool:
        """Whether it is on this peer to found the swarm: of those who look, who holds the newest step, the lowest.

        Args:
            records: of all peers of the run but this one.
            lookers: those of them who look, too.
            waited_s: from the moment at which others could know of it to that at which ``records`` were asked for. Who
                waits less than another one needs to tell of itself may not have heard of it.

        >>> newest = Founding(number=2, held_step=150, was_member=False, alone=False, window_s=3.0)
        >>> other = PeerRecord("Qm", number=1, held_step=100)
        >>> [newest.founds([other], [other], waited_s) for waited_s in (2.0, 3.0)]
        [False, True]
        >>> Founding(number=1, held_step=100, was_member=False, alone=False, window_s=3.0).founds(
        ...     [PeerRecord("Qm", number=2, held_step=150)], [PeerRecord("Qm", number=2, held_step=150)], 60.0
        ... )
        False
        """
        if self.was_member or (self.held_step < 0 and any(record.swarm for record in records)):
            return False  # it was there: a fresh start is no replacement
        if self.alone:
            return True
        mine = (-self.held_step, self.number)
        return waited_s >= self.window_s and all(mine <= (-each.held_step, each.number) for each in lookers)
