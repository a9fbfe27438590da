"""One run from start to end: data, replicas, steps, evaluations, checkpoints, signals, and the summary."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diloco.data.corpus import Corpus, build_corpus
from diloco.data.stream_corpus import open_stream
from diloco.errors import CheckpointError
from diloco.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Interrupted,
    Note,
    RunFinished,
    RunStarted,
    SampleGenerated,
    Sink,
    StepFinished,
)
from diloco.model.build import build_language_model, check_vocabulary, with_vocabulary
from diloco.train.checkpoint import open_checkpoint
from diloco.train.components import choose_device, make_transport
from diloco.train.definition import stored_definition
from diloco.train.environment import describe_environment
from diloco.train.evaluate import Evaluation, evaluate, mean_evaluation
from diloco.train.fleet import InProcessFleet, TorchFleet
from diloco.train.follow import follow_views
from diloco.train.generate import generate
from diloco.train.handshake import handshake_facts, model_fingerprint
from diloco.train.leader_fleet import LeaderFleet
from diloco.train.reports import checkpoint_about, run_facts, run_summary
from diloco.train.resize import checkpoint_home
from diloco.train.session import Session
from diloco.train.session_state import load_session, save_session
from diloco.train.settings import RunSettings
from diloco.train.stopping import StopRequest
from diloco.train.swarm_fleet import SwarmFleet
from diloco.train.trained import read_weights
from diloco.train.whole_file import write_whole

__all__ = ["run_training"]


Meet = Callable[[Mapping[str, str], Path], TorchFleet | LeaderFleet | SwarmFleet]
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
    if settings.train.threads is not None:
        torch.set_num_threads(settings.train.threads)
    torch.set_float32_matmul_precision(settings.train.matmul_precision)
    device = choose_device(settings.train)
    corpus = open_stream(settings.data) if settings.data.streaming else build_corpus(settings.data)
    settings = dataclasses.replace(settings, model=with_vocabulary(settings.model, corpus.tokenizer.vocab_size))
    definition = stored_definition(settings)
    outline = build_language_model(settings.model, seed=settings.seed, device="meta", definition=definition)
    check_vocabulary(outline, corpus.tokenizer.vocab_size)
    initial = read_weights(settings.train.init_from, settings.model) if settings.train.init_from else None
    resume = settings.checkpoint.resume
    fleet: InProcessFleet | TorchFleet | LeaderFleet | SwarmFleet
    if meet is None:
        fleet = InProcessFleet(make_transport(settings.transport))
    else:
        facts = handshake_facts(settings, outline, corpus.fingerprint)
        fleet = meet(facts, folder)
    session: Session | None = None
    try:
        session = Session(settings, corpus, fleet, device, sink.handle, initial, definition)
        run = _Run(settings, folder, sink, session, corpus, device)
        if not isinstance(fleet, InProcessFleet):
            run.find_place(fleet)
        elif resume is not None:
            run.resume(resume)
        if run.resumed_from is None or not (folder / "config.toml").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(config_toml, encoding="utf-8")
            corpus.tokenizer.save(folder)
        environment = json.dumps(describe_environment(device), indent=2)
        (folder / "environment.json").write_text(environment + "\n", encoding="utf-8")
        return run.train(notes)
    finally:
        if session is not None:
            session.close()
        fleet.close()


class _Run:
    """The state of `run_training` that its parts share."""

    def __init__(
        self, settings: RunSettings, folder: Path, sink: Sink, session: Session, corpus: Corpus, device: torch.device
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.home = folder.parent if session.fleet.group.position else folder
        self.sink = sink
        self.session = session
        self.corpus = corpus
        self.device = device
        self.speed = session.speed
        self.resumed_from: str | None = None

    @property
    def step(self) -> int:
        return self.session.totals.steps

    @property
    def tokens(self) -> int:
        """Seen so far, all replicas together."""
        return self.session.tokens

    def resume(self, path: Path) -> None:
        """Load the checkpoint at ``path``, refusing one of other data."""
        checkpoint = open_checkpoint(path)
        fingerprint = checkpoint.about.get("corpus")
        if fingerprint != self.corpus.fingerprint:
            raise CheckpointError(
                f"{checkpoint.path} was made with data of fingerprint {fingerprint}, and the data now has "
                f"{self.corpus.fingerprint}; the same files and tokeniser would work. Nothing was started."
            )
        fingerprint = checkpoint.about.get("model_fingerprint")
        mine = model_fingerprint(self.session.replicas[0].model)
        if fingerprint not in (None, mine):
            raise CheckpointError(
                f"{checkpoint.path} is of a model of {fingerprint}, and this is one of {mine}; the model that the run "
                "began with, from the same source, would work. Nothing was started."
            )
        for words in load_session(self.session, checkpoint, self.home):
            self._emit(Note(step=self.step, text=words))
        self.resumed_from = str(checkpoint.path)

    def find_place(self, fleet: TorchFleet | LeaderFleet | SwarmFleet) -> None:
        """Begin where the other processes are: with them at step 0, at a checkpoint that all have, or as a joiner."""
        if fleet.joining:
            self.session.take_over(fleet, self.settings.transport.rendezvous_timeout_s)
            self.resumed_from = "the other replicas"
            return
        if self.settings.checkpoint.resume is None:
            return
        if isinstance(fleet, SwarmFleet):
            self.resume(self.settings.checkpoint.resume)
            return
        held = fleet.held_steps()
        if min(held.values()) < 0:
            lacking = ", ".join(str(rank) for rank, step in held.items() if step < 0)
            raise CheckpointError(
                f"--resume was given, and rank {lacking} has no checkpoint in its folder; its checkpoints in place, or "
                "a new run with --init-from the global parameters of another one, would work. Nothing was started."
            )
        home = checkpoint_home(self.home, self.session.replicas[0].number, self.settings.checkpoint.resume)
        self.resume(home / "checkpoints" / f"step-{min(held.values()):08d}")

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
                if isinstance(fleet, SwarmFleet):
                    follow_views(fleet, self.session, stop, self._emit, self._save)
                if agreed is None:
                    agreed = fleet.stop_step(self.step, wanted=stop.signal is not None)
                    if agreed is not None:
                        last = min(last, agreed)
                        continue
                self._train_step()
                totals.wall_s = wall_before_s + time.perf_counter() - started_s
                if evaluate_every and self.step % evaluate_every == 0 and self.step < last and fleet.leads:
                    self._evaluate(final=False)
                if sample_every and self.step % sample_every == 0 and self.step < last and fleet.leads:
                    self._sample(final=False)
                if save_every and self.step % save_every == 0 and self.step < last:
                    self._save()
                    saved_at = self.step
            finished = self.step >= settings.train.steps
            if finished:
                self.session.drain()
            if saved_at != self.step or finished:
                self._save()
            if fleet.failure is not None and not fleet.elastic:
                self._emit(Note(step=self.step, text=f"{fleet.failure} The state at step {self.step} is saved."))
                raise fleet.failure
            interrupted = stop.signal or ("another replica" if agreed is not None and not finished else None)
            if interrupted:
                self._emit(Interrupted(step=self.step, signal=interrupted))
            evaluation = None if interrupted or not fleet.leads else self._evaluate(final=True)
            if finished and fleet.leads:
                self._sample(final=True)
        totals.wall_s = wall_before_s + time.perf_counter() - started_s
        summary = run_summary(self.session, self.folder, evaluation, interrupted)
        if finished and isinstance(fleet, SwarmFleet):
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
                tokens=self.tokens,
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

    def _evaluate(self, *, final: bool) -> Evaluation:
        settings = self.settings
        with self.session.evaluated_models() as models:
            evaluation = mean_evaluation(
                [
                    evaluate(
                        model,
                        self.corpus.tokenizer,
                        self.corpus.heldout,
                        sequence_length=settings.train.sequence_length,
                        batch_size=settings.train.batch_size * 8,
                        sequences=settings.evaluation.sequences,
                        document_masks=settings.train.document_masks,
                    )
                    for model in models
                ]
            )
        self._emit(
            Evaluated(
                step=self.step,
                heldout_loss=evaluation.loss,
                perplexity=evaluation.perplexity,
                bits_per_byte=evaluation.bits_per_byte,
                heldout_tokens=evaluation.tokens,
                final=final,
            )
        )
        return evaluation

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

    def _sample(self, *, final: bool) -> None:
        """Drawn by a generator of their own, so that training keeps its bits, and the same one each time."""
        settings, tokenizer = self.settings.evaluation, self.corpus.tokenizer
        if not settings.sample_tokens:
            return
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        for prompt in settings.sample_prompts:
            with self.session.evaluated_models() as models:
                tokens = generate(
                    models[0],
                    tokenizer.encode(prompt) or [tokenizer.eos_id],
                    generator,
                    max_new_tokens=settings.sample_tokens,
                    stop_token=tokenizer.eos_id,
                    window=self.settings.train.sequence_length,
                )
                text = tokenizer.decode(list(tokens))
            self._emit(SampleGenerated(step=self.step, prompt=prompt, text=text, final=final))

    def _emit(self, event: Event) -> None:
        self.sink.handle(event)
