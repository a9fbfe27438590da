"""The replicas of this process and their connection to the others: all in one process, or one rank of one replica."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs lack it

from diloco.data import Assignment
from diloco.errors import TransportError
from diloco.events import Event
from diloco.transport import Cluster, InProcessTransport, ReplicaGroup, Transport

FOLDER = "diloco/folder"  # in the store of torchrun


class Fleet:
    """The replicas of a run that all train in this process. Its subclasses replace what several processes need."""

    elastic: bool = False  # whether replicas may join and leave
    rejoins: bool = False  # whether this process searches for the other replicas after losing them
    joining: bool = False  # whether the others were already training when this process joined or rejoined
    restarted: bool = False  # whether a launcher has started all processes again
    group: ReplicaGroup = ReplicaGroup()  # the ranks of the local replica
    notes: tuple[str, ...] = ()  # sentences for the user about the beginning
    hub: InProcessTransport | None = None  # the transport of all replicas, if they train in this process
    transport: Transport  # of the first local replica

    def __init__(self, hub: InProcessTransport) -> None:
        self.hub, self.transport = hub, hub.endpoint(0)

    @property
    def local(self) -> tuple[int, ...]:
        """The numbers of the replicas that train in this process."""
        return self.hub.view.members if self.hub else (self.transport.replica,)

    @property
    def num_members(self) -> int:
        """The number of replicas that train, in all processes."""
        return len(self.transport.view.members)

    def endpoint(self, replica: int) -> Transport:
        """Return the transport of a local replica."""
        return self.hub.endpoint(replica) if self.hub else self.transport

    def leads(self) -> bool:
        """Return whether this process evaluates and reports for all replicas. Call it on all ranks of a replica."""
        return bool(self.group.share(self.local[0] == self.transport.view.members[0]))

    def failure(self) -> TransportError | None:
        """Return why the replicas can't continue together, or None. Call it on all ranks of a replica."""
        return None

    def take_assignments(self) -> tuple[Assignment, ...]:
        """Return the new data assignments since the last call, which follow when replicas join or leave."""
        return ()

    def publish(self, event: Event) -> None:
        """Publish an event for the status page."""

    def details(self) -> dict[str, str]:
        """Return facts about the connection to the other replicas, by name."""
        return {}

    def names(self) -> dict[str, str]:
        """Return the names of the replicas that have one, by number; no two are the same."""
        return {}

    def close_to_joiners(self, reason: str) -> None:
        """Refuse replicas that ask to join, giving ``reason``; "" admits them again."""

    def wait_for_start(self, stopped: Callable[[], bool]) -> None:
        """Wait until there are enough replicas to start training, or ``stopped`` returns True."""

    def stop_soon(self) -> None:
        """Act on the user's request to stop as soon as it arrives, in any thread, whatever the training waits for."""

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        """Return the step after which all replicas stop, or None; ``wanted``: whether this process wants to stop."""
        return step if wanted else None

    def finish(self, *, done: bool) -> None:
        """Wait until the others have finished too, then disconnect; ``done``: all steps are, as late ones are told."""

    def close(self) -> None:
        """Disconnect at once."""

    def accept_folder(self) -> None:
        """Confirm that this rank can train in its run folder."""

    def held_steps(self) -> dict[int, int]:
        """Return the newest step from which each rank could resume; -1 for none. Empty if all replicas are here."""
        return {}

    def explained(self, error: Exception) -> Exception:
        """Return the error to raise for one that training has raised, which may be that of another rank."""
        return error

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the connection for a checkpoint."""
        return self.hub.state_dict() if self.hub else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if self.hub:
            self.hub.load_state_dict(state)


@dataclass(frozen=True)
class Attempt:
    """The ranks that one torchrun has started, for the first time or again."""

    shared: Store  # torchrun's, which keeps its keys over restarts
    store: Store  # without keys of earlier attempts
    folder: Path  # the run folder
    restarted: bool  # whether an earlier attempt has trained in that folder


class ClusterFleet(Fleet):
    """One rank of a replica in a run over process groups, whose replicas are fixed and end together.

    Args:
        cluster: the connection to all ranks, which torch.distributed holds.
        group: the ranks of the replica.
        held: the newest step from which each rank could resume.
        attempt: what torchrun has started.
    """

    def __init__(self, cluster: Cluster, group: ReplicaGroup, held: Sequence[int], attempt: Attempt) -> None:
        self.cluster, self.transport, self.group, self.restarted = cluster, cluster.endpoint, group, attempt.restarted
        self._held, self._attempt = held, attempt

    def failure(self) -> TransportError | None:
        return self.cluster.roll.failure

    def accept_folder(self) -> None:
        roll = self.cluster.roll
        roll.meet("run folder", "", roll.silence_s)
        if roll.rank == 0:  # later attempts continue in it
            self._attempt.shared.set(FOLDER, str(self._attempt.folder))

    def stop_step(self, step: int, *, wanted: bool) -> int | None:
        if wanted:
            self.cluster.roll.ask_to_stop()
        return self.cluster.roll.stop_step(step)

    def held_steps(self) -> dict[int, int]:
        return dict(enumerate(self._held))

    def explained(self, error: Exception) -> Exception:
        return self.cluster.roll.explained(error)

    def finish(self, *, done: bool) -> None:
        self.cluster.roll.finish()

    def close(self) -> None:
        error = sys.exception()
        self.cluster.close("" if error is None else str(error) or repr(error))
        self.group.close()
        # if a rank is missing, NCCL would wait for it; if there is one replica, its group was that of all ranks
        if self.failure() is None and dist.is_initialized():
            dist.destroy_process_group()

    def state_dict(self) -> dict[str, Any]:
        transport = self.cluster.transport or self.transport
        return {"traffic": [transport.sent_bytes, transport.received_bytes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        transport = self.cluster.transport or self.transport
        transport.sent_bytes, transport.received_bytes = map(int, state["traffic"])
