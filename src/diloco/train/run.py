"""A whole training run: data, replicas, steps, evaluations, checkpoints, signals and the summary."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from diloco.algorithm import check_buffers, data_parallel_bytes
from diloco.checkpoint import open_checkpoint, write_whole
from diloco.data import Corpus, build_chat_corpus, build_corpus, open_stream
from diloco.devices import use_device
from diloco.errors import TransportError
from diloco.events import CheckpointSaved, Evaluated, Event, Interrupted, Note, RunFinished, RunStarted, Sink
from diloco.model import (
    LanguageModel,
    ModelSection,
    base_digest,
    build_language_model,
    check_vocabulary,
    with_vocabulary,
)
from diloco.outer import frozen_digests
from diloco.private_files import make_private_folder
from diloco.train.components import make_transport, outline, stored_definition
from diloco.train.dynamic_steps import make_pace
from diloco.train.environment import describe_environment
from diloco.train.fleet.base import Fleet, InProcessFleet
from diloco.train.fleet.peer_fleet import PeerFleet
from diloco.train.joining import find_beginning, follow_views
from diloco.train.session import Session
from diloco.train.session_reports import (
    checkpoint_about,
    evaluate_session,
    handshake_facts,
    leave_adapter,
    run_facts,
    run_summary,
    sample_session,
)
from diloco.train.session_state import save_session
from diloco.train.settings import RunSettings
from diloco.train.stopping import StopRequest
from diloco.train.torch_threads import choose_threads
from diloco.trained import read_weights

__all__ = ["run_training"]


Meet = Callable[[Mapping[str, str], Path], PeerFleet]
"""Connects this rank to the others and returns its fleet, from the facts to agree on and the rank's run folder."""


def run_training(
    settings: RunSettings,
    *,
    folder: Path,
    sink: Sink,
    config_toml: str,
    notes: Sequence[str] = (),
    meet: Meet | None = None,
) -> Mapping[str, Any]:
    """Train according to ``settings`` and write all results to ``folder``.

    Args:
        folder: the run folder, created if missing.
        sink: receives all events.
        config_toml: the settings as text, written to ``config.toml`` if the run is new.
        notes: sentences for the sink at the start.
        meet: connects to the processes of the other replicas. None: all replicas train in this process.

    Returns:
        The summary, which is also written to ``summary.json``. Its ``interrupted`` names the signal that stopped the
        run, or is None.

    Raises:
        DiLoCoError: if the run fails; the subclass says why. Complete checkpoints remain.
    """
    choose_threads()
    device = use_device(settings.train.device)
    corpus = _read_corpus(settings)
    settings = _with_vocabulary(settings, corpus.tokenizer.vocab_size)
    weightless = outline(settings, corpus.tokenizer.vocab_size)
    check_vocabulary(weightless, corpus.tokenizer.vocab_size)
    if settings.algorithm in ("streaming", "diloco"):
        check_buffers(weightless, {})
    initial = read_weights(settings.train.init_from, settings.model.settings) if settings.train.init_from else None
    definition = stored_definition(settings)
    base = _base_digest(settings, weightless, definition) if meet else ""
    peers = meet(handshake_facts(settings, weightless, corpus.fingerprint, base), folder) if meet else None
    fleet: Fleet = peers or InProcessFleet(make_transport(settings))
    session: Session | None = None

    def emit(event: Event) -> None:
        sink.handle(event)
        if peers:
            peers.publish(event)

    try:
        session = Session(settings, corpus, fleet, device, emit, initial, definition)
        if peers:
            session.pace = make_pace(settings, session.replicas[0].number, peers)
        home = folder.parent if fleet.group.position else folder
        resumed_from = find_beginning(session, peers, home, emit)
        with fleet.group.all_or_none():
            if resumed_from is None or not (folder / "config.toml").exists():
                make_private_folder(folder)
                write_whole(folder / "config.toml", config_toml)
                corpus.tokenizer.save(folder)
            environment = json.dumps(describe_environment(device), indent=2)
            write_whole(folder / "environment.json", environment + "\n")
        return _Run(session, peers, emit, folder, home, resumed_from).train(notes)
    finally:
        if session is not None:
            session.close()
        fleet.close()


def _with_vocabulary(settings: RunSettings, tokens: int) -> RunSettings:
    model = with_vocabulary(settings.model.settings, tokens)
    return settings if model is settings.model.settings else dataclasses.replace(settings, model=ModelSection.of(model))


def _base_digest(settings: RunSettings, weightless: LanguageModel, definition: Mapping[str, Any] | None) -> str:
    """Return a digest of the values that every replica begins with and none trains, or "" if there are none.

    They are the stored weights, or what the user's own model freezes.
    """
    stored = base_digest(settings.model.settings, definition)
    if stored or all(parameter.requires_grad for parameter in weightless.parameters()):
        return stored
    frozen = frozen_digests(build_language_model(settings.model.settings, seed=settings.seed, definition=definition))
    return xxhash.xxh3_128_hexdigest(json.dumps(frozen).encode())


def _read_corpus(settings: RunSettings) -> Corpus:
    if settings.data.chat:
        return build_chat_corpus(settings.data, settings.train.sequence_length)
    return open_stream(settings.data) if settings.data.streaming else build_corpus(settings.data)


class _Run:
    """The state of a run that the parts of `run_training` share."""

    def __init__(
        self,
        session: Session,
        peers: PeerFleet | None,
        emit: Callable[[Event], None],
        folder: Path,
        home: Path,
        resumed_from: str | None,
    ) -> None:
        self.settings = session.settings
        self.session = session
        self.peers = peers
        self.emit = emit
        self.folder = folder
        self.home = home
        self.resumed_from = resumed_from
        self.saved_at = self.step if resumed_from else -1
        self.wall_before_s, self.started_s = session.totals.wall_s, time.perf_counter()

    @property
    def step(self) -> int:
        return self.session.totals.steps

    def train(self, notes: Sequence[str]) -> dict[str, Any]:
        session, fleet, peers = self.session, self.session.fleet, self.peers
        self._emit_start(notes)
        with StopRequest(peers.leave_soon if peers else lambda: None) as stop:
            if peers and self.step < self.settings.train.steps:
                peers.wait_for_start(lambda: stop.signal is not None)
            session.open_to_joiners()
            stopped_by_others = self._take_steps(stop)
            finished = self.step >= self.settings.train.steps
            if finished:
                session.drain()
            if self.saved_at != self.step or finished:
                self._save()
            if (failure := fleet.failure) is not None and not (peers and peers.rejoins):
                self.emit(Note(step=self.step, text=f"{failure} The state at step {self.step} is saved."))
                raise failure
            # Signals arrive at any time and at any rank, so the ranks compare them once; what follows communicates.
            signals = [signal for signal in fleet.group.gather_texts(stop.signal or "") if signal]
            interrupted = next(iter(signals), "another replica" if stopped_by_others and not finished else None)
            if interrupted:
                self.emit(Interrupted(step=self.step, signal=interrupted))
            evaluation = None
            if not interrupted and fleet.leads:
                evaluation = self._evaluate(final=True)
            if finished and fleet.leads:
                self._sample(final=True)
            if finished:
                leave_adapter(session, self.home)
        self._count_time()
        summary = run_summary(session, self.folder, evaluation, interrupted)
        if finished and peers:
            peers.tell_finished()
        fleet.finish()
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.emit(RunFinished(step=self.step, summary=summary))
        return summary

    def _take_steps(self, stop: StopRequest) -> bool:
        """Train to the last step or the agreed stop step. Return whether the replicas agreed on a stop step."""
        train, fleet, peers = self.settings.train, self.session.fleet, self.peers
        evaluate_every, save_every = self.settings.evaluation.every_steps, self.settings.checkpoint.every_steps
        last = min(train.steps, train.stop_after or train.steps)
        agreed: int | None = None

        def due(every: int | None) -> bool:
            return bool(every) and self.step % (every or 1) == 0 and self.step < last

        while self.step < last:
            if peers and peers.rejoins:
                try:
                    follow_views(peers, self.session, stop, self.emit)
                except TransportError:
                    self._save()
                    raise
            if agreed is None:
                agreed = fleet.stop_step(self.step, wanted=stop.signal is not None)
                if agreed is not None:
                    last = min(last, agreed)
                    continue
            self._train_step()
            self._count_time()
            if due(evaluate_every) and fleet.leads:
                self._evaluate(final=False)
            if due(save_every):
                self._save()
        return agreed is not None

    def _train_step(self) -> None:
        epochs = self.session.epochs
        done = self.session.step()
        if self.peers and done.trained:
            mine = self.settings.train.batch_size * self.settings.train.sequence_length
            self.peers.note(loss=done.loss, tokens_per_s=mine / max(1e-9, done.step_s))
        self.emit(done)
        for name, epoch in self.session.epochs.items():
            if epoch == 2 and epochs.get(name) == 1:
                source = f"source {name!r}" if name else "the data"
                self.emit(Note(step=self.step, text=f"All of {source} has been read, and is now read again."))

    def _count_time(self) -> None:
        self.session.totals.wall_s = self.wall_before_s + time.perf_counter() - self.started_s

    def _emit_start(self, notes: Sequence[str]) -> None:
        settings, session, first = self.settings, self.session, self.session.replicas[0].diloco
        facts, details = run_facts(session, self.folder)
        self.emit(
            RunStarted(
                step=self.step,
                total_steps=settings.train.steps,
                algorithm=settings.algorithm,
                num_replicas=settings.network.replicas,
                parameters=session.replicas[0].model.num_parameters(),
                tokens_per_step=session.sequences_per_step * settings.train.sequence_length,
                resumed_from=self.resumed_from,
                flops_per_token=session.flops_per_token,
                peak_flops_per_s=session.peak_flops_per_s,
                data_parallel_bytes_per_step=data_parallel_bytes(
                    session.replicas[0].model.num_trained(), settings.network.replicas, 1
                ),
                facts=facts,
                details=details,
                names=session.fleet.names(),
                best_heldout_loss=session.totals.best_heldout_loss,
                rounds_committed=first.rounds_committed if first else 0,
                rounds_void=first.rounds_void if first else 0,
            )
        )
        for note in notes:
            self.emit(Note(step=self.step, text=note))

    def _evaluate(self, *, final: bool) -> Evaluated:
        evaluation, totals = evaluate_session(self.session, final=final), self.session.totals
        if math.isfinite(evaluation.heldout_loss):
            best = totals.best_heldout_loss
            totals.best_heldout_loss = min(evaluation.heldout_loss, math.inf if best is None else best)
        self.emit(evaluation)
        return evaluation

    def _sample(self, *, final: bool) -> None:
        for sample in sample_session(self.session, final=final):
            self.emit(sample)

    def _save(self) -> None:
        started_s = time.perf_counter()
        about = checkpoint_about(self.session)
        path = save_session(self.session, self.home / "checkpoints", about, self.settings.checkpoint.keep)
        size_bytes, free_bytes = self.session.fleet.group.done_by_leader(
            lambda: [open_checkpoint(path).size_bytes, shutil.disk_usage(path).free]
        )
        save_s = time.perf_counter() - started_s
        self.emit(
            CheckpointSaved(step=self.step, path=str(path), size_bytes=size_bytes, save_s=save_s, free_bytes=free_bytes)
        )
        self.saved_at = self.step
