"""The snapshots that a donor keeps for those who fetch them: which is current, and which may be dropped. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.transport.peers.state_wire import Description, TensorBytes

__all__ = ["Snapshot", "SnapshotCache"]


@dataclass(eq=False)
class Snapshot:
    """A fragment's state at one moment.

    Attributes:
        fragment: its index.
        version: of the donor's state, when the copy was made.
        description: what it consists of.
        values: the bytes of its tensors, which nobody changes.
        users: connections over which it is sent.
        held_until_s: until then somebody whose connection broke may come back for it.
        left_s: when the last user left.
    """

    fragment: int
    version: object
    description: Description
    values: TensorBytes
    users: int = 0
    held_until_s: float = -math.inf
    left_s: float = -math.inf


class SnapshotCache:
    """At most two snapshots of each fragment: one that is being sent, and one of what the state has become since.

    With one, an asker that comes after the next round would wait for the askers before it, or end their transfers; more
    than two would take more memory than twice the donor's own state. An asker that needs a third is told to come later.

    Attributes:
        held_s: how long a snapshot is kept for somebody whose connection broke; nothing takes its place meanwhile.
        kept_s: how long an unused one is kept while its place isn't needed.
    """

    PLACES = 2

    def __init__(self, held_s: float = 10.0, kept_s: float = 30.0) -> None:
        self.held_s = held_s
        self.kept_s = kept_s
        self.snapshots: list[Snapshot] = []

    def named(self, fragment: int, digest: str) -> Snapshot | None:
        """The snapshot with this digest."""
        found = (each for each in self.snapshots if (each.fragment, each.description.digest) == (fragment, digest))
        return next(found, None)

    def current(self, fragment: int, version: object) -> Snapshot | None:
        """The snapshot of this version."""
        found = (each for each in self.snapshots if each.fragment == fragment and each.version == version)
        return next(found, None)

    def make_room(self, fragment: int, now_s: float) -> bool:
        """Drop unused snapshots of ``fragment`` until there is a place for another; False if there is none."""
        while len(there := [each for each in self.snapshots if each.fragment == fragment]) >= self.PLACES:
            idle = [each for each in there if not each.users and each.held_until_s <= now_s]
            if not idle:
                return False
            self.snapshots.remove(min(idle, key=lambda each: each.left_s))
        return True

    def add(self, snapshot: Snapshot, now_s: float) -> Snapshot:
        """Keep it, or the one that is there already and holds the same."""
        same = self.named(snapshot.fragment, snapshot.description.digest)
        if same is not None:
            same.version = snapshot.version
            return same
        snapshot.left_s = now_s
        self.snapshots.append(snapshot)
        return snapshot

    def leave(self, snapshot: Snapshot, now_s: float, *, broken: bool) -> None:
        """One of its users is gone; if the connection broke, that user may come back."""
        snapshot.users -= 1
        snapshot.left_s = now_s
        if broken:
            snapshot.held_until_s = now_s + self.held_s

    def sweep(self, now_s: float) -> None:
        """Drop what nobody has used for long."""
        self.snapshots = [
            each for each in self.snapshots if each.users or now_s < max(each.left_s + self.kept_s, each.held_until_s)
        ]
