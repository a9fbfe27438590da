"""How a replica enters its run: from a checkpoint, by joining the other replicas, or by rejoining them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from diloco.algorithm import local_shard, model_state, trainable_parameters
from diloco.checkpoint import LASTING, Checkpoint, list_checkpoints, open_checkpoint, open_sound
from diloco.errors import (
    CheckpointError,
    ConfigurationError,
    EjectedError,
    RendezvousError,
    RunFinishedError,
    TransportError,
)
from diloco.events import Event, Lost, Note, ViewChanged
from diloco.membership import names_of
from diloco.signals import StopAsked, StopRequest
from diloco.state_tree import readable_state
from diloco.train.fleet import MetFleet
from diloco.train.replica import Replica
from diloco.train.session import Session
from diloco.train.state import checkpoint_of, load_session, replicas_in
from diloco.units import diff
from diloco.waiting import waiting_for

_RETRY_S = 1.0

OTHERS = "the other replicas"  # what a replica continues from that joins them
OVER = "the others, which have finished"  # what stops a replica that rejoins a run which has ended


def _join_run(session: Session, fleet: MetFleet) -> None:
    """Adopt what the other replicas have while they keep training, and become a member with a fresh inner optimizer."""
    (replica,) = session.replicas
    fleet.close_to_joiners("")
    if session.settings.algorithm not in ("streaming", "diloco"):
        raise ConfigurationError(
            f"Replica {replica.number} can't join a run of algorithm={session.settings.algorithm!r} that is already "
            "training; only DiLoCo and Streaming DiLoCo can be joined. Restart all replicas."
        )
    if session.settings.data.local or session.at_home:
        _find_own_place(session, replica)
    # in a swarm that is about to begin with a shared start, nobody has a state yet
    if not fleet.elastic or fleet.directory.step > 0 or replica.diloco is not None:
        _adopt_state(session, replica, fleet)
    _become_member(session, replica, fleet)


def _find_own_place(session: Session, replica: Replica) -> None:
    """Go on with what nobody else has, this replica's data and what stays at home, as its own checkpoint has it."""
    resume = session.settings.checkpoint.resume
    if resume is None or not (held := newest_checkpoints(Path(resume), replica.number, check=True)):
        return
    checkpoint = max(held, key=lambda each: each.step)
    _check_same_run(session, checkpoint)
    if session.settings.data.local:
        replica.sampler.load_state_dict(checkpoint.load(f"replica-{replica.number}")["sampler"])
    kept = {f"model/{name}": each for name, each in model_state(replica.model).items() if name in session.at_home}
    if kept:
        checkpoint.load_into(f"replica-{replica.number}-values", kept)


def _adopt_state(session: Session, replica: Replica, fleet: MetFleet) -> None:
    """Adopt the state of the others. Wait while they are connected but have none yet, because they have just started or
    still average gradients at every step."""
    diloco, why, transport = session.begin_diloco(replica), "", fleet.directory.transport
    with waiting_for(lambda: f"a state to adopt ({why or 'the other replicas are sending it'})", math.inf):
        while True:
            try:
                return diloco.take_over(fleet.transport.view.members)
            except TransportError as error:
                why = str(error).partition(". ")[0]
                connected = {*map(transport.rules.replica_of, transport.connections.connected)}
                if connected <= {transport.replica}:
                    raise
            time.sleep(_RETRY_S)


def follow_views(session: Session, stop: StopRequest, emit: Callable[[Event], None]) -> None:
    """Report the view changes since the last step, and rejoin the other replicas if this replica has lost them.

    A replica that was asked to stop does not search for the others, nor does one that ends with the loss.
    """
    step, fleet = session.totals.steps, session.fleet
    for finding in fleet.take_findings():
        emit(Note(step=step, text=finding))
    if not (isinstance(fleet, MetFleet) and fleet.rejoins):
        return
    for news, reason, cause in fleet.take_news():
        now = news.view.members if news.view else ()
        left = set(news.previous.members) - set(now)
        emit(
            ViewChanged(
                step=step,
                replica=fleet.transport.replica,
                view=news.view.id if news.view else news.previous.id,
                members=now,
                joined=news.joined,
                left=tuple(sorted(left)),
                lost=tuple(sorted(left.difference(news.left))),
                reason=reason,
                cause=cause,
                names=fleet.transport.names(),
            )
        )
        if left and session.settings.data.local:
            emit(Note(step=step, text=_share_lost(fleet, left)))
    failure = fleet.failure()
    if failure is None or stop.signal is not None:
        return
    emit(Lost(step=step, reason=str(failure)))
    # a process that is replaced isn't told that the run has ended: the others know only the new process
    replaced = fleet.directory.transport.views.replaced
    patience_s = session.settings.network.start_timeout_s if replaced else math.inf
    try:
        while True:
            try:
                _rejoin(session, fleet, stop, patience_s)
                break
            except (RunFinishedError, EjectedError):
                raise
            except TransportError as error:
                if replaced:
                    me = fleet.transport.replica
                    raise RendezvousError(f"Another process has taken the place of replica {me}: {error}") from error
                emit(Note(step=session.totals.steps, text=f"Rejoining failed and is tried again: {error}"))
            with stop.interrupting():
                time.sleep(_RETRY_S)
    except StopAsked:
        return
    except RunFinishedError as error:
        emit(Note(step=step, text=f"{error} The work that this replica has not shared is in its checkpoint."))
        stop.ask(OVER)
        return
    emit(Note(step=session.totals.steps, text="This replica has rejoined the others."))


def _share_lost(fleet: MetFleet, left: Collection[int]) -> str:
    """Return a sentence on the data that nobody else has, of replicas that have left."""
    tokens = {replica: site.tokens for replica, site in fleet.transport.sites().items()}
    gone = sum(tokens.get(replica, 0) for replica in left)
    share = f", {100 * gone / sum(tokens.values()):.0f} % of the tokens trained so far" if gone else ""
    return f"Nobody else has the data of {names_of(sorted(left))}{share}: the run goes on without it."


def _rejoin(session: Session, fleet: MetFleet, stop: StopRequest, patience_s: float) -> None:
    """Rejoin the other replicas after losing them: adopt their state and keep the work that is not shared yet.

    During the shared start there is no state to adopt yet: a replica that finds the others waits for its end. After a
    `TransportError` the call may be repeated.
    """
    (replica,) = session.replicas
    if replica.diloco is not None:
        # rounds in flight fail, and their work stays in the local parameters
        replica.diloco.drain(take_over=False)
    with stop.interrupting():
        fleet.rejoin(patience_s)
    replica.gradients.transport = fleet.transport
    if replica.diloco is not None:
        replica.diloco.change_transport(fleet.transport)
    session.open_to_joiners()
    if replica.diloco is not None:
        replica.diloco.take_over(fleet.transport.view.members, keep_work=True)
    else:
        shards = [local_shard(each) for each in trainable_parameters(replica.model).values()]
        before = [each.clone() for each in shards]
        try:
            with stop.interrupting():
                _adopt_state(session, replica, fleet)
        except BaseException:  # the replica stays in the shared start, with none of the others' fragments
            replica.diloco = None
            for shard, values in zip(shards, before, strict=True):
                shard.copy_(values)
            raise
    _become_member(session, replica, fleet)


def _become_member(session: Session, replica: Replica, fleet: MetFleet) -> None:
    totals, timeout_s = session.totals, session.settings.network.join_timeout_s
    before = totals.steps
    with waiting_for(lambda: "the other replicas to admit this one", timeout_s):
        totals.steps = fleet.join(timeout_s)
    missed = totals.steps - before
    totals.missed_steps += missed
    totals.joined_at = totals.steps
    steps, sequences = fleet.counted  # those of the member that has admitted this replica
    since = max(0, totals.steps - steps) * (fleet.num_members - 1) * session.settings.train.batch_size
    totals.missed_sequences = max(0, sequences + since - totals.sequences)
    if replica.diloco is not None:
        shared_start = min(session.settings.train.data_parallel_steps, replica.diloco.recovery.begun_after)
        replica.diloco.steps = totals.steps - shared_start
    if not session.settings.data.local:  # else it goes on where it is
        replica.sampler.join_at(totals.steps)


def find_beginning(session: Session) -> str | None:
    """Bring a new session to the point from which its run continues: that of the other replicas, or a checkpoint.

    Replicas in separate processes that start together continue from the newest checkpoint that all of them have.
    Return what the run continues from, for the log; None: from step 0.
    """
    fleet = session.fleet
    if isinstance(fleet, MetFleet) and fleet.joining:
        _join_run(session, fleet)
        return OTHERS
    resume, steps = session.settings.checkpoint.resume, fleet.held_steps
    if resume is None and max(steps.values(), default=-1) < 0:
        return None
    path = Path(resume or "")
    if steps:
        if fleet.restarted and min(steps.values()) < 0:  # not all had saved, so all begin again
            return None
        if lacking := ", ".join(str(rank) for rank, step in steps.items() if step < 0):
            raise CheckpointError(
                f"--resume needs a checkpoint on every rank, but rank {lacking} has none in its folder. Copy its "
                "checkpoints there, or start a new run with --init-from from the global parameters of an existing one."
            )
        step, newest = min(steps.values()), max(steps.values())
        if step < newest:
            behind = ", ".join(str(rank) for rank, held in steps.items() if held == step)
            whole = f"All ranks continue from step {step}, the last one that is whole on rank {behind}"
            fleet.notes = (*fleet.notes, f"{whole}; another rank has step {newest}.")
        common = _run_folder(path) / "checkpoints" / f"step-{step:08d}"
        path = next((each.path for each in newest_checkpoints(common, fleet.local[0])), common)

    def check(checkpoint: Checkpoint) -> None:
        for number in fleet.local:  # other replicas of this process may be in folders of their own
            if (other := checkpoint_of(number, checkpoint)) is not checkpoint:
                other.check_content()

    def sound() -> list[Any]:
        checkpoint, passed_over = open_sound(path, check if len(fleet.local) > 1 else lambda checkpoint: None)
        return [str(checkpoint.path), *passed_over]

    found, *passed_over = fleet.group.done_by_leader(sound)
    fleet.notes = (*fleet.notes, *passed_over)
    with fleet.group.all_or_none():  # a rank may not see the file
        checkpoint = open_checkpoint(Path(found))
        _check_same_run(session, checkpoint)
    with readable_state(str(checkpoint.path)):
        load_session(session, checkpoint)
    return str(checkpoint.path)


def _check_same_run(session: Session, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of different data or a different model. `DiLoCo` compares what concerns its own state."""
    saved = checkpoint.fact("identity", dict)
    there, here = str(checkpoint.path), "this run"
    if words := diff(saved, session.identity, there, here, LASTING):
        if not diff(saved, session.identity, there, here, [name for name in LASTING if name != "data"]):
            files = {"data": checkpoint.fact("files", str, "")}, {"data": session.corpus.files}
            words = diff(*files, there, here) or words  # which files
        raise CheckpointError(
            f"{words}. Use the model, the files and the tokenizer with which the run started. Nothing was loaded."
        )


def held_checkpoint(resume: str | None) -> tuple[int, int | None, str]:
    """Return the step of the checkpoint that ``--resume`` names (-1: none), its only replica, and its swarm.

    A replica that ended before its first checkpoint can still join others.
    """
    try:
        checkpoint = open_sound(Path(resume))[0] if resume else None
    except CheckpointError:  # reported when it is loaded
        checkpoint = None
    if checkpoint is None:
        return -1, None, ""
    replicas = replicas_in(checkpoint)
    with readable_state(str(checkpoint.path)):
        swarm = str(checkpoint.load("run")["transport"].get("swarm", ""))
    return checkpoint.step, replicas[0] if len(replicas) == 1 else None, swarm


def held_step(replica: int, resume: Path, *, check: bool = False) -> int:
    """Return the newest step from which a replica could resume, as ``--resume`` names it; -1 for none.

    Args:
        check: whether to read the files, and pass over a damaged checkpoint.
    """
    return max((checkpoint.step for checkpoint in newest_checkpoints(resume, replica, check=check)), default=-1)


def newest_checkpoints(resume: Path, replica: int, *, check: bool = False) -> list[Checkpoint]:
    """Return the newest checkpoints of a replica: of all replicas, and of it alone; or those of the step in ``resume``.

    One process saves all replicas in the run folder, in which a process of the replica's own saves in its own folder.
    """

    def usable(checkpoint: Checkpoint) -> bool:
        try:
            if check:
                checkpoint.check_content()
        except CheckpointError:
            return False
        return replica in replicas_in(checkpoint)

    name = os.path.basename(os.path.abspath(resume))
    run, name, newest = _run_folder(resume), name if name.startswith("step-") else "", []
    for folder in (run, run / f"replica-{replica}") if replica else (run,):
        named = [each for each in list_checkpoints(folder / "checkpoints") if name in ("", each.path.name)]
        newest += [each for each in reversed(named) if usable(each)][:1]
    return newest


def _run_folder(resume: Path) -> Path:
    """Return the run folder of what ``--resume`` names: itself, or the one that holds this checkpoint."""
    path = Path(os.path.abspath(resume))
    return next((each.parent for each in (path, path.parent) if each.name == "checkpoints"), resume)
