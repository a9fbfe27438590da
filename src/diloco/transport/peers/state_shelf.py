"""The snapshots that a donor holds for those who fetch them: which one is still good, and which one may go. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.transport.peers.state_wire import Description, TensorBytes

__all__ = ["Shelf", "Snapshot"]


@dataclass(eq=False)
class Snapshot:
    """A fragment's state at one moment.

    Attributes:
        fragment: its index.
        version: of the donor's state, when the copy was made.
        description: what it consists of.
        values: the bytes of its tensors, which nobody changes.
        users: connections that it is sent over.
        held_until_s: somebody whose connection broke may come back for it until then.
        left_s: when the last user left.
    """

    fragment: int
    version: object
    description: Description
    values: TensorBytes
    users: int = 0
    held_until_s: float = -math.inf
    left_s: float = -math.inf


class Shelf:
    """Room for two snapshots of each fragment: one that is being sent, and one of what the state has become.

    One would not do: whoever comes after a round was committed would wait for who came before, or end his transfer.
    More would be more of the donor's memory than twice its own global parameters and outer state. So whoever needs a
    third while two are in use is told to come later.

    Attributes:
        held_s: how long a snapshot waits for who lost the connection; nothing takes its place meanwhile.
        kept_s: how long one that nobody uses stays, as long as its room isn't needed.
    """

    ROOM = 2

    def __init__(self, held_s: float = 10.0, kept_s: float = 30.0) -> None:
        self.held_s = held_s
        self.kept_s = kept_s
        self.snapshots: list[Snapshot] = []

    def named(self, fragment: int, digest: str) -> Snapshot | None:
        """The snapshot of that name."""
        found = (each for each in self.snapshots if (each.fragment, each.description.digest) == (fragment, digest))
        return next(found, None)

    def current(self, fragment: int, version: object) -> Snapshot | None:
        """The snapshot of that version."""
        found = (each for each in self.snapshots if each.fragment == fragment and each.version == version)
        return next(found, None)

    def make_room(self, fragment: int, now_s: float) -> bool:
        """Let go of what nobody needs until another one of ``fragment`` fits; False if it never does."""
        while len(there := [each for each in self.snapshots if each.fragment == fragment]) >= self.ROOM:
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
        """One of its users is gone; where the connection broke, he may come back."""
        snapshot.users -= 1
        snapshot.left_s = now_s
        if broken:
            snapshot.held_until_s = now_s + self.held_s

    def sweep(self, now_s: float) -> None:
        """Let go of what nobody has used for long."""
        self.snapshots = [
            each for each in self.snapshots if each.users or now_s < max(each.left_s + self.kept_s, each.held_until_s)
        ]
