"""A session in a checkpoint: all replicas of a process in one, or one replica as its ranks share it out.

The number of replicas may change between saving and loading:

- A replica that was there before goes on with all that it had, except for the rounds in flight: they were between other
  replicas, and count as void. Global parameters did not move, so the next rounds contain the work.
- A new replica begins with the global parameters and outer state, and a fresh inner optimizer.
- Of a replica that is gone, only its work since its fragments were last sent is lost.
- The data goes on where it was: nothing is drawn twice, and the replicas there are now draw what was left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.algorithm.averaging import RoundId
from diloco.checkpoint.reading import Checkpoint, open_checkpoint
from diloco.checkpoint.shards import SavedValues, Shards, load_own
from diloco.checkpoint.writing import save_checkpoint
from diloco.data.batches import Cursor
from diloco.errors import CheckpointError
from diloco.train.local_replica import Replica, share_global_state
from diloco.train.replica_state import with_rounds_void
from diloco.train.resuming import base_home, replicas_in
from diloco.train.session import Session, Totals
from diloco.trained.load import REST, rest_of_state

__all__ = ["load_session", "save_session"]


def save_session(session: Session, folder: Path, about: Mapping[str, Any], keep: int) -> Path:
    """Save all that the session needs to go on; to be called on all ranks of a replica.

    A replica in a process of its own is saved by its ranks, even if it has only one, so that another number of ranks
    can go on with it.

    Raises:
        CheckpointError: if anything went wrong; what was complete before still is.
    """
    step, run = session.totals.steps, {"totals": vars(session.totals), "transport": session.fleet.state_dict()}
    rest = rest_of_state(session.replicas[0].model)
    agreed = {"global": session.global_params()} | ({REST: rest} if rest else {})
    if session.fleet.in_one_process:
        replicas = {f"replica-{replica.number}": _whole_state(replica) for replica in session.replicas}
        return save_checkpoint(folder, step, {"run": run, **agreed, **replicas}, about=about, keep=keep)
    (replica,), name = session.replicas, f"replica-{session.replicas[0].number}"
    own = {"diloco": replica.state.own(), "random": replica.random_state.state_dict()}
    return save_checkpoint(
        folder,
        step,
        {"run": run, name: {"common": replica.state.common(), "sampler": replica.sampler.state_dict()}},
        shards={name: Shards(replica.state.values(), own, _num_shards(session))},
        gathered=agreed,
        about=about,
        keep=keep,
        group=session.fleet.group,
    )


def load_session(session: Session, checkpoint: Checkpoint, home: Path) -> tuple[str, ...]:
    """Go on where `save_session` was called; to be called on all ranks of a replica.

    Args:
        checkpoint: of its replicas, or, for a new replica in a process of its own, of replica 0.

    Returns:
        What is different from then on, a sentence each: another number of replicas, and rounds that were in flight
        between others and are void, whose work is in the next ones.

    Raises:
        CheckpointError: if it is of another model, or another kind of run.
    """
    run = checkpoint.load("run")
    session.totals = Totals(**run["totals"])
    session.part_models()
    saved = _saved_replicas(session, checkpoint, home)
    if saved.differ and session.settings.algorithm == "none":
        raise CheckpointError(
            f"{checkpoint.path} is of {saved.number} independent replicas, which agree on nothing that another number "
            f"of them ({saved.now}) could go on from. Use the same number of replicas."
        )
    session.fleet.load_state_dict(_fleet_state(session, saved, run["transport"]))
    void: tuple[RoundId, ...] = ()
    for replica in session.replicas:
        source = saved.source(replica.number)
        state = checkpoint.load(f"replica-{source}")
        load = _load_whole if session.fleet.in_one_process else _load_shards
        void = load(session, replica, saved, state)
        if saved.differ:
            replica.sampler.go_on_from(saved.cursor_of, saved.number)
        else:
            replica.sampler.load_state_dict(state["sampler"])
        if replica.diloco is not None:
            replica.diloco.shared.data_order = replica.sampler.order
            replica.diloco.shared.begun_after = session.totals.steps - replica.diloco.steps
            if source != replica.number:  # it keeps what all agree on; where gradients are averaged, that is everything
                replica.diloco.begin_from_global()
                replica.inner.optimizer.state.clear()
        share_global_state(replica, session.replicas[0])
    words = (f"{round_id} was in flight between others, and counts as void." for round_id in void)
    return (*saved.words(), *dict.fromkeys(words))


@dataclass(frozen=True)
class _SavedReplicas:
    """The replicas that saved a checkpoint."""

    checkpoint: Checkpoint  # what a replica goes on with: its own, or replica 0's where it is new
    # run folder of replica 0, with those of the others in it; None: the checkpoint holds all replicas
    base: Path | None
    number: int  # of replicas that saved it
    now: int  # number of replicas that go on

    @property
    def differ(self) -> bool:
        """Whether another number of replicas goes on."""
        return self.number != self.now

    def source(self, replica: int) -> int:
        """Whose state a replica begins from."""
        return replica if f"replica-{replica}" in self.checkpoint.parts else 0

    def cursor_of(self, replica: int) -> Cursor:
        """Where a replica stood in its data.

        Raises:
            CheckpointError: if its checkpoint can't be read.
        """
        part, checkpoint = f"replica-{replica}", self.checkpoint
        if part not in checkpoint.parts:
            assert self.base is not None, "a checkpoint of one process holds all replicas"
            home = self.base / part if replica else self.base
            place = home / "checkpoints" / checkpoint.path.name
            try:
                checkpoint = open_checkpoint(place)
            except CheckpointError as error:
                raise CheckpointError(
                    f"Only replica {replica}'s own checkpoint, {place}, says what it has not read, and that is needed "
                    f"to share the data out to {self.now} replicas instead of {self.number}: {error} Put the folders "
                    "of all replicas into that of replica 0, or use the same number of replicas."
                ) from error
        cursor: Cursor = checkpoint.load(part)["sampler"]
        return cursor

    def words(self) -> tuple[str, ...]:
        """What is different from here on, a sentence each."""
        if not self.differ:
            return ()
        if self.now > self.number:
            change = (
                f"the {self.now - self.number} new ones begin with the global parameters and a fresh inner optimizer"
            )
        else:
            change = f"what the other {self.number - self.now} did since they last sent is lost, and no more"
        return (f"{self.now} replicas go on where {self.number} stopped: {change}. The data goes on where it was.",)


def _saved_replicas(session: Session, checkpoint: Checkpoint, home: Path) -> _SavedReplicas:
    now, mine = session.settings.transport.replicas, session.replicas[0].number
    if not session.fleet.elastic:
        base = None if session.fleet.in_one_process else base_home(home, mine)
        return _SavedReplicas(checkpoint, base, int(checkpoint.about["num_replicas"]), now)
    if mine not in (theirs := replicas_in(checkpoint)):  # in a swarm, each goes on with its own alone
        way_out = f"Give --replica {theirs[0]}, or leave it out." if theirs else "Use one of this replica."
        raise CheckpointError(
            f"{checkpoint.path} is of replica {', '.join(map(str, theirs)) or 'none'}, and this is replica {mine}. "
            f"{way_out}"
        )
    return _SavedReplicas(checkpoint, None, now, now)


def _fleet_state(session: Session, saved: _SavedReplicas, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the fleet goes on with; where replicas are new, they have sent nothing, and their clock is replica 0's."""
    if not session.fleet.in_one_process:
        mine = session.replicas[0].number
        return state if saved.source(mine) == mine or not state else {**state, "traffic": [0, 0]}
    if not saved.differ:
        return state
    kept = min(saved.now, len(state["traffic"]))
    network = state["network"]
    if network is not None:
        network = {name: [*values[:kept], *([values[0]] * (saved.now - kept))] for name, values in network.items()}
    traffic = [*state["traffic"][:kept], *([[0, 0]] * (saved.now - kept))]
    return {"traffic": traffic, "network": network, "decided": []}


def _whole_state(replica: Replica) -> dict[str, Any]:
    return {
        "model": replica.model.saved_state(),
        "inner": replica.inner.state_dict(),
        "sampler": replica.sampler.state_dict(),
        "random": replica.random_state.state_dict(),
        "diloco": replica.diloco.state_dict() if replica.diloco else None,
    }


def _load_whole(
    session: Session, replica: Replica, saved: _SavedReplicas, state: Mapping[str, Any]
) -> tuple[RoundId, ...]:
    """Take over `_whole_state`; the rounds in flight that are void."""
    try:
        replica.model.load_saved_state(state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint is of another model: {error}") from error
    replica.inner.load_state_dict(state["inner"])
    if saved.source(replica.number) == replica.number:
        replica.random_state.load_state_dict(state["random"])
    diloco = state["diloco"]
    void: tuple[RoundId, ...] = ()
    if diloco is not None:
        if saved.differ:
            void = tuple(RoundId(int(entry["fragment"]), int(entry["outer_step"])) for entry in diloco["in_flight"])
            codecs = [None if codec is None else {"residual": codec["residual"]} for codec in diloco["codecs"]]
            diloco = with_rounds_void({**diloco, "codecs": codecs, "in_flight": []}, void)
        session.begin_diloco(replica).load_state_dict(diloco)
    return void


def _load_shards(
    session: Session, replica: Replica, saved: _SavedReplicas, state: Mapping[str, Any]
) -> tuple[RoundId, ...]:
    """Take over this rank's share of what the ranks of a replica saved; the rounds in flight that are void."""
    common, source = state["common"], saved.source(replica.number)
    name = f"replica-{source}"
    if common["diloco"] is not None:
        session.begin_diloco(replica)
    own = None
    if source == replica.number:
        own = load_own(saved.checkpoint, name, session.fleet.group.position, _num_shards(session))
    rounds = None if own is None else own["diloco"]
    values = SavedValues(saved.checkpoint, name)
    void = replica.state.load(values, common, rounds, same_replicas=not saved.differ)
    if own is not None:
        replica.random_state.load_state_dict(own["random"])
    return void


def _num_shards(session: Session) -> int:
    """S where the ranks of a replica share the parameters out, 1 where each holds all of them."""
    return session.fleet.group.size if session.settings.train.parallelism == "fsdp" else 1
