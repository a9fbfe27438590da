"""What a rank knows of the others: their connections, their reports on the end of a view, and what they announce."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, get_args

from diloco.events import Site
from diloco.membership import Report, View
from diloco.protocol.rules import Rules
from diloco.protocol.wire import Entry, FactsMessage, MessageError, Topic

_MOST_UNSTEADY = 2
_QUIET_BEATS = 1.5  # a connected rank from which nothing is received for so many heartbeats is unsteady for a while
_UNSTEADY_PERIODS = 10  # times that: how long it stays unsteady


class Roster:
    """The connections by rank, when each was last heard, and which are those of the view's members.

    All that silence shows is decided here, of other ranks and of this process, which may have been suspended.
    """

    def __init__(self, rules: Rules) -> None:
        self.connections: dict[int, int] = {}  # rank -> number of its connection
        self.addresses: dict[int, str] = {}  # rank -> the address on which it listens
        self._processes: dict[int, str] = {}  # rank -> the name of the process that is connected
        self.heard_s: dict[int, float] = {}  # rank -> when its last message was received
        self._quiet_s: dict[int, float] = {}  # rank -> when its last quiet period ended
        self._beat_s = math.inf  # when this process last beat, once it has
        self._woke_s = -math.inf  # when it last beat after a pause in which others may have lost it
        self.in_doubt: set[int] = set()  # ranks whose connection has ended for a reason that is still unknown
        self._rules = rules
        # the members' ranks -> their connections, though other processes may have replaced them since; None: it was not
        # connected when the view began
        self.members: dict[int, int | None] = {}
        self._member_processes: dict[int, str] = {}  # the members' ranks -> their processes, as far as they are known

    def connect(self, rank: int, connection: int, address: str, process: str, now_s: float) -> bool:
        """Return whether this is the process of a member, which is back."""
        self.connections[rank], self.addresses[rank], self._processes[rank] = connection, address, process
        self.heard_s[rank] = now_s
        self.in_doubt.discard(rank)
        is_back = bool(process) and rank in self.members and self._member_processes.get(rank) == process
        if is_back:
            self.members[rank] = connection
        return is_back

    def note_message(self, rank: int, now_s: float) -> None:
        if rank in self.heard_s:
            if now_s - self.heard_s[rank] > _QUIET_BEATS * self._rules.heartbeat_s:
                self._quiet_s[rank] = now_s
            self.heard_s[rank] = now_s

    def beat(self, now_s: float) -> bool:
        """Note a heartbeat of this process. Return whether it stood still since the last one.

        Then the silence of all others is counted anew.
        """
        pause_s, self._beat_s = now_s - self._beat_s, now_s
        if pause_s > self._rules.silence_s - self._rules.heartbeat_s:
            self._woke_s = now_s
        if is_late := pause_s > 2 * self._rules.heartbeat_s + 1:
            self.heard_s = dict.fromkeys(self.heard_s, now_s)
        return is_late

    def was_suspended(self, now_s: float) -> bool:
        """Return whether this process was recently silent for so long that others may have declared it lost."""
        silence_s = self._rules.silence_s
        return now_s - self._beat_s > silence_s - self._rules.heartbeat_s or now_s - self._woke_s < silence_s

    def silent(self, members: Collection[int], now_s: float) -> list[int]:
        """Return the ranks that count as lost by silence.

        A process that is cut off from the others, or stood still, hears nothing from most of them. It then waits for up
        to twice `Rules.silence_s`, so that all of them count as lost at once: its messages may still reach some, to
        which it must not accuse the others. A few quiet ``members``, or any number of other processes, delay nothing.
        """
        rules, quiet_s = self._rules, {rank: now_s - heard_s for rank, heard_s in self.heard_s.items()}
        waiting_s = [quiet_s[rank] for rank in members if quiet_s.get(rank, math.inf) <= rules.silence_s]
        most_are_quiet = 2 * sum(quiet > 2 * rules.heartbeat_s for quiet in waiting_s) > len(waiting_s)
        longest_s = 2 * rules.silence_s if most_are_quiet else rules.silence_s
        return [rank for rank, quiet in quiet_s.items() if quiet > longest_s]

    def unsteady(self, view: View, now_s: float) -> frozenset[int]:
        """Return each connected member of ``view`` that is quiet, or has been recently.

        The set is empty if more than two are quiet: then this replica, or its machine, is more likely to have been
        suspended.
        """
        limit_s = _QUIET_BEATS * self._rules.heartbeat_s
        quiet = frozenset(
            self._rules.replica_of(rank)
            for rank in filter(self.is_connected, self._rules.ranks(view.members))
            if now_s - self._quiet_s.get(rank, -math.inf) < _UNSTEADY_PERIODS * limit_s
            or now_s - self.heard_s[rank] > limit_s
        ) - {self._rules.replica}
        return quiet if len(quiet) <= _MOST_UNSTEADY else frozenset()

    def disconnect(self, rank: int) -> None:
        for by_rank in (self.connections, self.addresses, self._processes, self.heard_s, self._quiet_s):
            by_rank.pop(rank, None)

    def set_members(self, view: View) -> None:
        """Make the processes that are connected now the members of ``view``; those that were members before stay."""
        self.members = self.processes(view)
        connected = {rank: self._processes[rank] for rank in filter(self.is_connected, self.members)}
        known = self._member_processes | connected
        self._member_processes = {rank: known[rank] for rank in self.members if rank in known}

    def processes(self, view: View) -> dict[int, int | None]:
        """Return the ranks of ``view`` and the connections of their processes, as far as is known."""
        ranks = self._rules.ranks(view.members)
        return {rank: self.members.get(rank, self.connections.get(rank)) for rank in ranks}

    def process(self, rank: int) -> str:
        """Return the name of a member's process; "" if it is unknown."""
        return self._member_processes.get(rank, "")

    def recognise(self, rank: int, connection: int | None) -> bool:
        """Take the process with this connection for the member whose process this one has not known, if that is so.

        Another one may be connected since.
        """
        is_current = connection is not None and connection == self.connections.get(rank)
        is_unknown = is_current and rank in self.members and rank not in self._member_processes
        if is_unknown:
            self.members[rank] = connection
            self._member_processes[rank] = self._processes[rank]
        return is_unknown

    def is_from_member(self, rank: int, connection: int | None) -> bool:
        """Return whether a message is from a member; ``connection`` is None if it has ended since."""
        return rank in self.members and (connection is None or connection == self.members[rank])

    def is_connected(self, rank: int) -> bool:
        """Return whether the process connected as ``rank`` is the member."""
        return rank in self.members and rank in self.connections and self.members[rank] == self.connections[rank]

    def reaches(self, replica: int) -> bool:
        """Return whether all ranks of a replica are connected; if they are members, as the members' processes."""
        ranks = self._rules.ranks((replica,))
        return all(self.is_connected(rank) if rank in self.members else rank in self.connections for rank in ranks)

    def unconnected(self, view: View) -> frozenset[int]:
        """Return the other members of ``view``, the current view, that are not connected."""
        connected = {member for member in view.members if all(map(self.is_connected, self._rules.ranks((member,))))}
        return frozenset(view.members) - connected - {self._rules.replica}

    def members_in_doubt(self) -> set[int]:
        """Return the members whose connection has ended for a reason that is still unknown."""
        return {self._rules.replica_of(rank) for rank in self.in_doubt if rank in self.members}

    def replaced(self, replicas: Collection[int]) -> frozenset[int]:
        """Return those of ``replicas`` whose place other processes have taken, which shows that they have ended."""
        return frozenset(
            replica
            for replica in replicas
            if any(rank in self.connections and not self.is_connected(rank) for rank in self._rules.ranks((replica,)))
        )


class Reports:
    """What the ranks of a view have reported on its end."""

    def __init__(self) -> None:
        self.last: dict[int, Report] = {}  # rank -> its last report, as sent or received
        self.number = 0  # of all reports

    def keep(self, report: Report) -> None:
        self.last[report.rank] = report
        self.number += 1

    def forget(self, rank: int) -> None:
        self.last.pop(rank, None)

    def union(self, *names: str) -> frozenset[Any]:
        """Return what is in these fields of any last report."""
        return frozenset().union(*(getattr(report, name) for report in self.last.values() for name in names))

    @property
    def has_accepted(self) -> bool:
        return any(report.accepted for report in self.last.values())


class Announcements:
    """What ranks have said of themselves: an entry, and the numbers of each `Announcement`.

    Each rank sends its entry, with the facts about its training loop, to all connected ranks. A rank that has already
    sent its own answers with it, so that a joining replica learns those of the members. A rank compares once, when its
    own loop begins. A joiner with other arguments therefore stops without disturbing the others.
    """

    def __init__(self, rules: Rules) -> None:
        self.stopping = False  # whether this rank stops, by itself or with the others
        self.entries: dict[int, Entry] = {}  # by rank
        self.numbers: dict[Topic, dict[int, float]] = {topic: {} for topic in get_args(Topic)}  # by topic and rank
        self.sites: dict[int, Site] = {}  # by rank, also of those that are not members any more
        self._rules = rules
        self._connections: dict[int, int | None] = {}  # rank -> the connection over which its entry came
        self._were_members = set[tuple[int, int | None]]()  # ranks with the connections of their processes

    @property
    def mine(self) -> Entry | None:
        return self.entries.get(self._rules.rank)

    def receive(self, sender: int, message: FactsMessage, connection: int | None) -> Entry | None:
        """Record another rank's entry. Return this rank's own if the sender expects it in answer."""
        if message.entry.rank != sender:
            raise MessageError("the message holds the facts of another rank")
        self.entries[sender], self._connections[sender] = message.entry, connection
        return None if message.answer else self.mine

    def begin_view(self, members: Mapping[int, int | None]) -> None:
        """Forget the numbers of all but ``members``: the ranks of the view, with the connections of their processes."""
        self._were_members.update(members.items())
        for topic, numbers in self.numbers.items():  # another process may take the place of one that has left
            self.numbers[topic] = {rank: number for rank, number in numbers.items() if rank in members}

    def forget(self, rank: int) -> None:
        if not self._is_of_member(rank):
            self.entries.pop(rank, None)

    def _is_of_member(self, rank: int) -> bool:
        """Return whether the entry of a rank is a current or former member's, and not that of a process that has since
        taken its rank."""
        return (rank, self._connections.get(rank)) in self._were_members

    def refusal(self) -> str:
        """Return the first difference from a current or former member, naming both sides, or "" if there is none."""
        if (mine := self.mine) is None:
            return ""
        others = (entry for rank, entry in sorted(self.entries.items()) if self._is_of_member(rank))
        return next(filter(None, (mine.diff(entry, self._rules.ranks_per_replica) for entry in others)), "")
