"""Going on with another number of replicas than a checkpoint was saved by.

- A replica that was there before goes on with all that it had, but for the rounds in flight: they were between other
  replicas, and count as void. Global parameters did not move, so the next rounds have the work.
- A new replica begins with the global parameters and outer state, and a fresh inner optimizer.
- Of a replica that is gone, only its work since its fragments were last sent is lost.
- The data goes on where it was: what was drawn is not drawn again, and what was left is drawn by those there are now.

Where each replica is a process with a folder of its own, a new one begins from replica 0's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.algorithm.averaging import RoundId
from diloco.checkpoint.reading import Checkpoint, held_step, list_checkpoints, open_checkpoint
from diloco.data.batches import Cursor
from diloco.errors import CheckpointError
from diloco.train.held import replicas_in

__all__ = ["Before", "base_home", "checkpoint_home", "grown_fleet_state", "without_rounds_in_flight"]


class Before:
    """The replicas that saved a checkpoint.

    Args:
        checkpoint: what a replica goes on with: its own, or replica 0's where it is new.
        base: run folder of replica 0, with those of the others in it; None: the checkpoint holds all replicas.
        now: number of replicas that go on.

    Attributes:
        number: of replicas that saved it.
    """

    def __init__(self, checkpoint: Checkpoint, base: Path | None, now: int) -> None:
        self.checkpoint = checkpoint
        self.base = base
        self.now = now
        self.number = int(checkpoint.about["num_replicas"])
        self._alone = False

    @classmethod
    def of_one(cls, checkpoint: Checkpoint, replica: int, now: int) -> Before:
        """Of a replica in a swarm, which goes on with its own alone; who else takes part is up to the swarm.

        Raises:
            CheckpointError: if it is another replica's.
        """
        if replica not in (theirs := replicas_in(checkpoint)):
            given = f"--replica {theirs[0]}, or leaving it out," if theirs else "one of this replica"
            raise CheckpointError(
                f"{checkpoint.path} is of replica {', '.join(map(str, theirs)) or 'none'}, and this is replica "
                f"{replica}; {given} would work. Nothing was started."
            )
        before = cls(checkpoint, None, now)
        before.number, before._alone = now, True
        return before

    @property
    def differs(self) -> bool:
        """Whether another number goes on."""
        return self.number != self.now

    def source(self, replica: int) -> int:
        """Whose state a replica begins from."""
        return replica if self._alone or replica < self.number else 0

    def cursor_of(self, replica: int) -> Cursor:
        """Where a replica stood in its data.

        Raises:
            CheckpointError: if its checkpoint is not at hand.
        """
        part = f"replica-{replica}"
        if part in self.checkpoint.parts:
            cursor: Cursor = self.checkpoint.load(part)["sampler"]
            return cursor
        assert self.base is not None, "a checkpoint of one process holds all replicas"
        home = self.base / part if replica else self.base
        place = home / "checkpoints" / self.checkpoint.path.name
        try:
            other = open_checkpoint(place)
        except CheckpointError as error:
            raise CheckpointError(
                f"What replica {replica} has not read is known to its own checkpoint alone, and {place} is needed to "
                f"share it out to {self.now} replicas instead of {self.number}: {error} The folders of all replicas in "
                "that of replica 0 would work, or the same number of replicas. Nothing was started."
            ) from error
        found: Cursor = other.load(part)["sampler"]
        return found

    def words(self) -> tuple[str, ...]:
        """What is different from here on, a sentence each."""
        if not self.differs:
            return ()
        if self.now > self.number:
            change = (
                f"the {self.now - self.number} new ones begin with the global parameters and a fresh inner optimizer"
            )
        else:
            change = f"what the other {self.number - self.now} did since they last sent is lost, and no more"
        return (f"{self.now} replicas go on where {self.number} stopped: {change}. The data goes on where it was.",)


def checkpoint_home(home: Path, replica: int, resume: Path) -> Path:
    """The run folder with the checkpoints that a replica goes on with: its own, or replica 0's where it is new.

    Args:
        home: the replica's own run folder, which is in that of replica 0.
        replica: its number.
        resume: what to go on from, as for `held_step`.
    """
    base = base_home(home, replica)
    if base == home or held_step(base, resume) < 0:
        return home
    newest = list_checkpoints(base / "checkpoints")[-1]
    return home if replica < int(newest.about["num_replicas"]) else base


def without_rounds_in_flight(state: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[RoundId, ...]]:
    """A state of `DiLoCo` whose rounds in flight are over, and those rounds."""
    void = tuple(RoundId(int(entry["fragment"]), int(entry["outer_step"])) for entry in state["in_flight"])
    finished = list(state["finished_rounds"])
    for round_id in void:
        finished[round_id.fragment] = round_id.outer_step + 1
    codecs = [None if codec is None else {"residual": codec["residual"]} for codec in state["codecs"]]
    return {
        **state,
        "codecs": codecs,
        "in_flight": [],
        "finished_rounds": finished,
        "rounds_void": int(state["rounds_void"]) + len(void),
    }, void


def grown_fleet_state(state: Mapping[str, Any], now: int) -> dict[str, Any]:
    """The state of the emulated way between replicas for another number of them; a new one's clock is replica 0's."""
    kept = min(now, len(state["traffic"]))
    traffic = [*state["traffic"][:kept], *([[0, 0]] * (now - kept))]
    network = state["network"]
    if network is not None:
        network = {name: [*values[:kept], *([values[0]] * (now - kept))] for name, values in network.items()}
    return {"traffic": traffic, "network": network, "decided": []}


def base_home(home: Path, replica: int) -> Path:
    """The run folder of replica 0, which has those of the others in it."""
    return home.parent if replica else home
