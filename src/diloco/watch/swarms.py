"""A swarm, followed by asking its peers what they do and what has happened. A stranger's words are checked first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.watch.members import Seen
from diloco.watch.page_data import Watched
from diloco.watch.records import is_record, text, whole

if TYPE_CHECKING:
    from diloco.transport.hivemind.visitor import PeerReport

__all__ = ["FollowedSwarm"]

_OF_ROUNDS = ("RoundSent", "RoundCommitted", "RoundVoid", "ViewChanged")
_MOST_PEERS = 1_024


class FollowedSwarm:
    """What is known of a run whose peers are asked again and again."""

    def __init__(self, run: str, join: Sequence[str]) -> None:
        self.run = Watched(run, f"swarm, by way of {', '.join(join)}")  # what the page shows
        self.since: dict[str, int] = {}  # peer -> the number of the event to ask from
        self._heard_s: dict[str, float] = {}

    def take(self, found: Sequence[PeerReport], states: Mapping[str, str], now_s: float) -> None:
        """Take in what peers answered.

        Args:
            states: peer -> why it does not answer; of those that don't.
            now_s: seconds since 1970.
        """
        seen = []
        for report in found[:_MOST_PEERS]:
            number, status = whole({"": report.number}, ""), report.status
            if number is None:  # it trains nothing
                continue
            name = f"replica {number}"
            if status:
                self._heard_s[report.peer_id] = now_s
                self._take_events(name, number, report.peer_id, status)
            seen.append(
                Seen(
                    process=name,
                    replica=number,
                    peer_id=report.peer_id,
                    state=text(status, "state")[:40] if status else states.get(report.peer_id, "no answer"),
                    heard_s=self._heard_s.get(report.peer_id),
                    way=report.way,
                    round_trip_s=report.round_trip_s,
                    status=status,
                )
            )
        self.run.seen = sorted(seen, key=lambda each: each.replica)
        self.run.problems = [] if seen else ["No peer of this run has been seen within the last half hour."]

    def _take_events(self, name: str, number: int, peer_id: str, status: Mapping[str, Any]) -> None:
        told, following = status.get("events"), whole(status, "next_event")
        if not isinstance(told, list) or following is None:
            return
        asked_from = self.since.get(peer_id, 0)
        if following < asked_from:  # another process, which counts from 0
            self.since[peer_id] = 0
            return
        self.since[peer_id] = following
        history = self.run.history
        for record in told if following > asked_from else ():
            if not is_record(record):
                continue
            if record["event"] in _OF_ROUNDS and whole(record, "replica") != number:
                continue  # everybody speaks for itself alone
            history.take(name, record)
