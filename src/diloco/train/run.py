"""One run from start to end: data, replicas, steps, evaluations, checkpoints, signals, and the summary."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diloco.checkpoint.disk import write_whole
from diloco.checkpoint.reading import open_checkpoint
from diloco.data.corpus import build_corpus, open_stream
from diloco.devices import choose_device
from diloco.events import (
    CheckpointSaved,
    Event,
    Interrupted,
    Note,
    RunFinished,
    RunStarted,
    Sink,
    StepFinished,
)
from diloco.model.build import check_vocabulary, with_vocabulary
from diloco.train.beginning import find_beginning
from diloco.train.components import make_transport, outline, stored_definition
from diloco.train.describe import describe_environment
from diloco.train.fleet.base import InProcessFleet
from diloco.train.fleet.returning import Returning
from diloco.train.fleet.swarm_fleet import SwarmFleet
from diloco.train.follow import follow_views
from diloco.train.handshake import handshake_facts
from diloco.train.joining import JoinableFleet
from diloco.train.progress import evaluate_session, sample_session
from diloco.train.reports import checkpoint_about, run_facts, run_summary
from diloco.train.session import Session
from diloco.train.session_state import save_session
from diloco.train.settings import RunSettings
from diloco.train.stopping import StopRequest
from diloco.train.threads import choose_threads
from diloco.train.trained import read_weights

__all__ = ["run_training"]


Meet = Callable[[Mapping[str, str], Path], JoinableFleet]
"""What the ranks must agree on, and the folder of this one -> its fleet."""


def run_training(
    settings: RunSettings,
    *,
    folder: Path,
    sink: Sink,
    config_toml: str,
    notes: Sequence[str] = (),
    meet: Meet | None = None,
) -> Mapping[str, Any]:
    """Train as ``settings`` say, and leave everything in ``folder``.

    Args:
        settings: resolved.
        folder: of the run; made if missing.
        sink: told of everything that happens.
        config_toml: the settings as text, written to ``config.toml`` when the run is new.
        notes: sentences that the sink is told at the start.
        meet: finds the processes of the other replicas; None: all replicas train in this one.

    Returns:
        The summary, also written to ``summary.json``; ``interrupted`` names the signal that stopped the run, or is
        None.

    Raises:
        DiLoCoError: of the kind that fits; a checkpoint that was complete stays.
    """
    choose_threads(settings.train.threads)
    torch.set_float32_matmul_precision(settings.train.matmul_precision)
    device = choose_device(settings.train.device)
    corpus = open_stream(settings.data) if settings.data.streaming else build_corpus(settings.data)
    settings = dataclasses.replace(settings, model=with_vocabulary(settings.model, corpus.tokenizer.vocab_size))
    weightless = outline(settings, corpus.tokenizer.vocab_size)
    check_vocabulary(weightless, corpus.tokenizer.vocab_size)
    initial = read_weights(settings.train.init_from, settings.model) if settings.train.init_from else None
    fleet: InProcessFleet | JoinableFleet
    if meet is None:
        fleet = InProcessFleet(make_transport(settings.transport))
    else:
        facts = handshake_facts(settings, weightless, corpus.fingerprint)
        fleet = meet(facts, folder)
    session: Session | None = None
    try:
        session = Session(settings, corpus, fleet, device, sink.handle, initial, stored_definition(settings))
        home = folder.parent if fleet.group.position else folder
        resumed_from = find_beginning(session, fleet, home, sink.handle)
        if resumed_from is None or not (folder / "config.toml").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(config_toml, encoding="utf-8")
            corpus.tokenizer.save(folder)
        environment = json.dumps(describe_environment(device), indent=2)
        (folder / "environment.json").write_text(environment + "\n", encoding="utf-8")
        return _Run(folder, home, sink, session, resumed_from).train(notes)
    finally:
        if session is not None:
            session.close()
        fleet.close()


class _Run:
    """The state of `run_training` that its parts share."""

    def __init__(self, folder: Path, home: Path, sink: Sink, session: Session, resumed_from: str | None) -> None:
        self.settings = session.settings
        self.folder = folder
        self.home = home
        self.sink = sink
        self.session = session
        self.speed = session.speed
        self.resumed_from = resumed_from

    @property
    def step(self) -> int:
        return self.session.totals.steps

    def train(self, notes: Sequence[str]) -> dict[str, Any]:
        settings, totals = self.settings, self.session.totals
        last = min(settings.train.steps, settings.train.stop_after or settings.train.steps)
        self._emit(
            RunStarted(
                step=self.step,
                total_steps=settings.train.steps,
                algorithm=settings.algorithm,
                num_replicas=settings.transport.replicas,
                parameters=self.session.num_parameters,
                tokens_per_step=self.session.sequences_per_step * settings.train.sequence_length,
                resumed_from=self.resumed_from,
                flops_per_token=self.speed.flops_per_token,
                peak_flops_per_s=self.speed.peak_flops_per_s,
                facts=run_facts(self.session, self.folder),
            )
        )
        for note in notes:
            self._emit(Note(step=self.step, text=note))
        wall_before_s, started_s = totals.wall_s, time.perf_counter()
        evaluate_every, save_every = settings.evaluation.every_steps or 0, settings.checkpoint.every_steps or 0
        sample_every = settings.evaluation.sample_every_steps
        saved_at = self.step if self.resumed_from else -1
        fleet = self.session.fleet
        agreed: int | None = None
        with StopRequest(fleet.leave_soon if isinstance(fleet, SwarmFleet) else lambda: None) as stop:
            if isinstance(fleet, SwarmFleet):
                fleet.wait_for_start(lambda: stop.signal is not None)
            self.session.open_to_joiners()
            while self.step < last:
                if isinstance(fleet, Returning) and fleet.comes_back:
                    follow_views(fleet, self.session, stop, self._emit, self._save)
                if agreed is None:
                    agreed = fleet.stop_step(self.step, wanted=stop.signal is not None)
                    if agreed is not None:
                        last = min(last, agreed)
                        continue
                self._train_step()
                totals.wall_s = wall_before_s + time.perf_counter() - started_s
                if evaluate_every and self.step % evaluate_every == 0 and self.step < last and fleet.leads:
                    evaluate_session(self.session, self._emit, final=False)
                if sample_every and self.step % sample_every == 0 and self.step < last and fleet.leads:
                    sample_session(self.session, self._emit, final=False)
                if save_every and self.step % save_every == 0 and self.step < last:
                    self._save()
                    saved_at = self.step
            finished = self.step >= settings.train.steps
            if finished:
                self.session.drain()
            if saved_at != self.step or finished:
                self._save()
            if fleet.failure is not None and not fleet.comes_back:
                self._emit(Note(step=self.step, text=f"{fleet.failure} The state at step {self.step} is saved."))
                raise fleet.failure
            interrupted = stop.signal or ("another replica" if agreed is not None and not finished else None)
            if interrupted:
                self._emit(Interrupted(step=self.step, signal=interrupted))
            evaluation = None
            if not interrupted and fleet.leads:
                evaluation = evaluate_session(self.session, self._emit, final=True)
            if finished and fleet.leads:
                sample_session(self.session, self._emit, final=True)
        totals.wall_s = wall_before_s + time.perf_counter() - started_s
        summary = run_summary(self.session, self.folder, evaluation, interrupted)
        if finished and isinstance(fleet, Returning):
            fleet.tell_finished()
        fleet.finish()
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        self._emit(RunFinished(step=self.step, summary=summary))
        return summary

    def _train_step(self) -> None:
        started_s = time.perf_counter()
        epochs = self._epochs()
        result = self.session.step()
        sent_bytes, received_bytes = self.session.traffic()
        inner, step_s = result.inner, time.perf_counter() - started_s
        if isinstance(self.session.fleet, SwarmFleet) and result.trained:
            mine = self.settings.train.batch_size * self.settings.train.sequence_length
            self.session.fleet.note(loss=result.loss, tokens_per_s=mine / max(1e-9, step_s))
        self._emit(
            StepFinished(
                step=self.step,
                loss=result.loss,
                learning_rate=inner[0].learning_rate,
                gradient_norm=sum(step.gradient_norm for step in inner) / len(inner),
                tokens=self.session.tokens,
                step_s=step_s,
                sent_bytes=sent_bytes,
                received_bytes=received_bytes,
                compute_utilization=self.session.compute_utilization(),
                skipped_replicas=sum(step.skipped for step in inner) if result.trained else 0,
                trained=result.trained,
                pace=result.pace,
                model_flops_utilization=self.speed.utilization(step_s) if result.trained else None,
            )
        )
        for name, epoch in self._epochs().items():
            if epoch > epochs.get(name, epoch) and self.session.fleet.leads:
                source = f"source {name!r}" if name else "the data"
                self._emit(Note(step=self.step, text=f"All of {source} has been read; its epoch {epoch + 1} begins."))

    def _epochs(self) -> dict[str, int]:
        """Source -> how often all of it has been read."""
        return {name: int(number) for name, number in self.session.replicas[0].sampler.epochs.items()}

    def _save(self) -> None:
        started_s = time.perf_counter()
        about = checkpoint_about(self.session)
        path = save_session(self.session, self.home / "checkpoints", about, self.settings.checkpoint.keep)
        size_bytes = open_checkpoint(path).size_bytes
        self._emit(
            CheckpointSaved(
                step=self.step, path=str(path), size_bytes=size_bytes, save_s=time.perf_counter() - started_s
            )
        )

    def _emit(self, event: Event) -> None:
        self.sink.handle(event)
