"""A whole training run: data, replicas, steps, evaluations, checkpoints, signals and the summary."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from diloco.algorithm import check_buffers, data_parallel_bytes
from diloco.checkpoint import CheckpointWriter, Mirror, open_checkpoint, write_whole
from diloco.data import Corpus, build_corpus
from diloco.devices import choose_threads, release_memory, usable_cores, use_device
from diloco.errors import CheckpointError, DiLoCoError, TransportError
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
    Site,
    mean_loss,
    to_json,
)
from diloco.model import GENERATION_NAME, LanguageModel, check_vocabulary, generation_settings, with_vocabulary
from diloco.private_files import make_private_folder
from diloco.signals import StopRequest
from diloco.train.description import describe, identity, make_transport, outline, untrained_digest
from diloco.train.fleet import Fleet, MetFleet
from diloco.train.joining import OTHERS, find_beginning
from diloco.train.met_session import MetSession
from diloco.train.own_tokenizer import States, agree_on_tokenizer, is_of_founder
from diloco.train.replica import seed_process
from diloco.train.session import Session
from diloco.train.settings import RunSettings
from diloco.train.state import save_session
from diloco.trained import Evaluation, check_origin, evaluate, generate, read_weights, text_of
from diloco.units import format_count

SAMPLE_TOKENS = 200

MAX_PASSES = 4
"""Up to so many passes, repeated text teaches about as much as new text (Muennighoff et al., 2305.16264)."""

REPEATS = (
    f"This replica has read all of its own data {MAX_PASSES} times and reads it again. Further passes teach less and "
    "less; if its held-out loss rises, give it more data or fewer steps."
)

Meet = Callable[[Mapping[str, str], Path], Fleet]
"""Connects this rank to the others and returns its fleet, from the identity of the run and the rank's run folder."""


def run_training(
    settings: RunSettings,
    *,
    folder: Path,
    sink: Sink,
    config_toml: str,
    notes: Sequence[str] = (),
    meet: Meet | None = None,
    corpus: Corpus | None = None,
) -> Mapping[str, Any]:
    """Train according to ``settings`` and write all results to ``folder``, which is created if missing.

    Args:
        config_toml: the settings as text, written to ``config.toml`` once all replicas accept them.
        notes: sentences for the sink at the start.
        meet: connects to the processes of the other replicas. None: all replicas train in this process.
        corpus: what ``settings.data`` names, if it has been read already.

    Returns:
        The summary, as in ``summary.json``. Its ``interrupted`` names the signal that stopped the run, or is None.
    """
    choose_threads()
    device = use_device(settings.train.device)
    vocab_size = settings.data.bpe_vocab_size or 0
    if not is_of_founder(settings):  # else it is known only once this replica has met the others
        corpus = corpus or build_corpus(settings.data, settings.train.sequence_length)
        vocab_size = corpus.tokenizer.vocab_size
    release_memory()
    settings = dataclasses.replace(settings, model=with_vocabulary(settings.model, vocab_size))
    weightless = outline(settings, vocab_size)
    check_vocabulary(weightless, vocab_size)
    check_buffers(weightless)
    # alone, only what stays frozen is ever compared: with the base of adapters when the run resumes
    base = untrained_digest(settings, weightless) if meet or settings.model.lora_rank else ""

    def facts() -> dict[str, str]:
        if corpus is None:
            return identity(settings, weightless, "", base, {"tokenizer": f"{settings.data.tokenizer}, of the founder"})
        return identity(settings, weightless, corpus.fingerprint, base, corpus.tokenizer.facts)

    mine = facts()
    beside: States = {}
    initial = None
    if settings.train.init_from is not None:
        names = ("base model", "configuration", "tokenizer") if settings.model.lora_rank else ("tokenizer",)
        check_origin(settings.train.init_from, {name: mine[name] for name in names})
        initial = read_weights(settings.train.init_from, settings.model)
    fleet: Fleet = meet(mine, folder) if meet else Fleet(make_transport(settings).endpoints)
    seed_process(settings.seed, fleet.local[0])

    def emit(event: Event) -> None:
        sink.handle(event)
        if not (settings.data.local and isinstance(event, SampleGenerated)):  # which may repeat what was trained on
            fleet.place.publish(event)

    # it disconnects before the rest ends, so that no replica waits for the last upload of one that has failed
    with ExitStack() as at_end, fleet.connected():
        if corpus is None:
            corpus, beside = agree_on_tokenizer(settings, fleet)
            mine = facts()
        kind = MetSession if isinstance(fleet, MetFleet) else Session
        session = kind(settings, corpus, fleet, device, emit, initial, mine, beside)
        at_end.callback(session.close)
        home = folder.parent if fleet.group.position else folder
        resumed_from = find_beginning(session)
        run = _Run(session, emit, folder, home, resumed_from)
        at_end.enter_context(run.mirroring())  # before anything is in the folder, as the place may be refused
        with fleet.group.all_or_none():
            try:
                if resumed_from is None or not (folder / "config.toml").exists():
                    make_private_folder(folder)
                    corpus.tokenizer.save(folder)
                    if generation := generation_settings(settings.model):
                        write_whole(folder / GENERATION_NAME, json.dumps(generation, indent=2) + "\n")
                write_whole(folder / "config.toml", config_toml)  # a run may continue with changes
            except OSError as error:
                raise DiLoCoError(f"{folder} can't be written: {error.strerror or error}.") from error
        at_end.enter_context(closing(run.writer))
        return run.train(notes)


@dataclasses.dataclass
class _Run:
    session: Session
    emit: Callable[[Event], None]
    folder: Path
    home: Path
    resumed_from: str | None

    def __post_init__(self) -> None:
        self.settings = self.session.settings
        here = self.home / "checkpoints" / f"step-{self.step:08d}"
        self.saved_at = -1
        if self.resumed_from is not None and Path(self.resumed_from).resolve() == here.resolve():
            self.saved_at = self.step
        self.writer, self.save_began_s = CheckpointWriter(self.session.fleet.group), 0.0
        self.wall_before_s, self.started_s = self.session.totals.wall_s, time.perf_counter()
        self.mirror: Mirror | None = None
        self.epoch = self.session.epoch
        self.local_loss: float | None = None  # with own data, of the local parameters before the last merge

    @property
    def step(self) -> int:
        return self.session.totals.steps

    @contextmanager
    def mirroring(self) -> Iterator[None]:
        """Upload the checkpoints that are saved in the block, and then wait until the last one is there."""
        settings, fleet, number = self.settings.checkpoint, self.session.fleet, self.session.replicas[0].number
        if settings.mirror is None:
            yield
            return
        mirror = Mirror(settings.mirror, self.home, settings.keep, 0 if fleet.elastic else number)
        fleet.group.done_by_leader(lambda: mirror.claim(self.session.identity, fresh=self.resumed_from is None))
        self.mirror = mirror if fleet.group.leads else None
        try:
            yield
        except BaseException:  # what ended the run counts, and not that its last upload fails as well
            try:
                mirror.close()
            except CheckpointError as error:
                self.emit(Note(step=self.step, text=str(error)))
            raise
        mirror.close()

    def train(self, notes: Sequence[str]) -> dict[str, Any]:
        session, fleet = self.session, self.session.fleet
        self._emit_start()
        for note in (*notes, *fleet.notes):
            self.emit(Note(step=self.step, text=note))
        with StopRequest(fleet.stop_soon) as stop:
            if self.step < self.settings.train.steps:
                fleet.wait_for_start(lambda: stop.signal is not None)
            session.open_to_joiners()
            if self.step == 0 and (self.resumed_from is None or fleet.elastic):  # who joins takes the others' state
                session.agree_on_weights()
            if self.saved_at != self.step and self.resumed_from not in (None, OTHERS):
                self._save()  # what it continues from is in another folder
            stopped_by_others = self._take_steps(stop)
            finished = self.step >= self.settings.train.steps
            if finished:
                session.drain()
            if self.saved_at != self.step or finished:
                self._save(wait=True)
            self._report_saved(wait=True)
            if (failure := fleet.failure()) is not None and not fleet.rejoins:
                self.emit(Note(step=self.step, text=f"{failure} The state at step {self.step} is saved."))
                raise failure
            # Signals arrive at any time and at any rank, so the ranks compare them once; what follows communicates.
            signals = [signal for signal in fleet.group.gather_texts(stop.signal or "") if signal]
            interrupted = next(iter(signals), "another replica" if stopped_by_others and not finished else None)
            if interrupted:
                self.emit(Interrupted(step=self.step, signal=interrupted))
            evaluation = None
            if not interrupted and self._evaluates:
                evaluation = self._evaluate(final=True)
            if finished and fleet.leads():
                self._sample()
        self._count_time()
        summary = self._summary(evaluation, interrupted)
        write_whole(self.folder / "summary.json", to_json(summary, indent=2) + "\n")
        self.emit(RunFinished(step=self.step, summary=summary))
        fleet.finish(done=finished)  # may take a while: absent replicas are told of the end until they answer
        return summary

    def _take_steps(self, stop: StopRequest) -> bool:
        """Train to the last step or the agreed stop step. Return whether the replicas agreed on a stop step."""
        train, fleet = self.settings.train, self.session.fleet
        evaluate_every = self.settings.evaluation.every_steps
        save_every = self.settings.checkpoint.every_steps
        last = min(train.steps, train.stop_after or train.steps)
        agreed: int | None = None

        def due(every: int | None, step: int | None = None) -> bool:
            step = self.step if step is None else step
            return bool(every) and step % (every or 1) == 0 and step < last

        while self.step < last:
            try:
                self.session.follow_views(stop)
            except TransportError:
                self._save(wait=True)
                raise
            if agreed is None:
                agreed = fleet.stop_step(self.step, wanted=stop.signal is not None)
                if agreed is not None:
                    last = min(last, agreed)
                    continue
            compares = self.settings.data.local and (due(evaluate_every, self.step + 1) or self.step + 1 == last)
            finished = self.session.step(self._measure_local) if compares else self.session.step()
            self.emit(finished)
            if self.settings.data.local and self.epoch <= MAX_PASSES < finished.epoch:
                self.emit(Note(step=self.step, text=REPEATS))
            self.epoch = finished.epoch
            self._count_time()
            self._report_saved(wait=False)
            if due(evaluate_every) and self._evaluates:
                self._evaluate(final=False)
            if due(save_every):
                self._save()
        return agreed is not None

    def _count_time(self) -> None:
        self.session.totals.wall_s = self.wall_before_s + time.perf_counter() - self.started_s

    def _emit_start(self) -> None:
        settings, session, first = self.settings, self.session, self.session.replicas[0].diloco
        threads, cores, model = torch.get_num_threads(), usable_cores(), session.replicas[0].model
        peak, device = session.peak_flops_per_s, f"{session.device}, {threads} thread{'' if threads == 1 else 's'}"
        device += "" if threads == cores else f" on {cores} cores"
        device += f", {format_count(peak)} operations/s at most" if peak is not None else ""
        facts = {**session.corpus.facts, **describe(settings, model), "device": device}
        details = {**session.identity, **session.fleet.details()}
        self.emit(
            RunStarted(
                step=self.step,
                total_steps=settings.train.steps,
                algorithm=settings.algorithm,
                num_replicas=settings.network.replicas,
                parameters=model.num_parameters(),
                tokens_per_step=session.sequences_per_step * settings.train.sequence_length,
                resumed_from=self.resumed_from,
                flops_per_token=session.flops_per_token,
                peak_flops_per_s=peak,
                data_parallel_bytes_per_step=data_parallel_bytes(model.num_trained(), settings.network.replicas, 1),
                facts={**facts, "run folder": str(self.folder)},
                details=details,
                names=session.fleet.transport.names(),
                best_heldout_loss=session.totals.best_heldout_loss,
                shared_start_steps=settings.train.data_parallel_steps,
                rounds_committed=first.rounds_committed if first else 0,
                rounds_void=first.rounds_void if first else 0,
                tokens=session.tokens,
                sent_bytes=session.traffic()[0],
                received_bytes=session.traffic()[1],
            )
        )

    @property
    def _evaluates(self) -> bool:
        """Whether this process evaluates: the first of all, or with own data each. Call it on all ranks."""
        return self.settings.data.local or (self.session.corpus.evaluates and self.session.fleet.leads())

    def _evaluate(self, *, final: bool) -> Evaluated | None:
        """Evaluate the global parameters if anything is held out; with own data, also compare with the others."""
        own, totals, evaluation = self.settings.data.local, self.session.totals, None
        if self.session.corpus.evaluates:
            with self.session.global_model() as model:
                evaluation = self._loss_of(model)
        sites = self._compare_sites(evaluation, final=final) if own else {}
        if evaluation is None:
            return None
        if math.isfinite(evaluation.loss):
            best = totals.best_heldout_loss
            totals.best_heldout_loss = min(evaluation.loss, math.inf if best is None else best)
        event = Evaluated(
            step=self.step,
            heldout_loss=evaluation.loss,
            perplexity=evaluation.perplexity,
            bits_per_byte=evaluation.bits_per_byte,
            heldout_tokens=evaluation.tokens,
            final=final,
            local_loss=self.local_loss,
            sites=sites,
            sites_loss=mean_loss(sites),
        )
        self.emit(event)
        return event

    def _measure_local(self) -> None:
        """Evaluate the local parameters before a merge, if there is one, replaces them."""
        first = self.session.replicas[0]
        if self.session.corpus.evaluates and first.diloco is not None:
            self.local_loss = self._loss_of(first.model).loss

    def _loss_of(self, model: LanguageModel) -> Evaluation:
        settings, corpus = self.settings, self.session.corpus
        return evaluate(
            model,
            corpus.tokenizer,
            corpus.heldout,
            sequence_length=settings.train.sequence_length,
            batch_size=settings.train.batch_size * 8,
            sequences=settings.evaluation.sequences,
            document_masks=settings.data.document_masks,
            precision=settings.train.precision,
        )

    def _compare_sites(self, evaluation: Evaluation | None, *, final: bool) -> dict[str, Site]:
        """Tell the other replicas the loss on this one's data, and return theirs; at the end, wait for them a while."""
        sampler, train = self.session.replicas[0].sampler, self.settings.train
        loss = evaluation.loss if evaluation and math.isfinite(evaluation.loss) else None
        tokens = sampler.state_dict()["drawn"] * train.batch_size * train.sequence_length
        site = Site(self.step, loss, tokens, sampler.epochs)
        return self.session.fleet.exchange_site(site, self.settings.network.silence if final else 0.0)

    def _sample(self) -> None:
        """Generate a sample for each prompt from a generator that training does not use."""
        session, tokenizer, inner = self.session, self.session.corpus.tokenizer, self.session.replicas[0].inner
        cast = inner.autocast_dtype if inner.parallel.num_shards > 1 else None  # the type in which layers are gathered
        generator = torch.Generator(session.device).manual_seed(self.settings.seed)
        for prompt in self.settings.evaluation.sample_prompts:
            autocast = torch.autocast(session.device.type, cast, enabled=cast is not None)
            with session.global_model() as model, autocast:
                tokens = generate(
                    model,
                    begin := tokenizer.encode_prompt(prompt),
                    generator,
                    max_new_tokens=SAMPLE_TOKENS,
                    stop_tokens=[tokenizer.eos_id],
                    window=self.settings.train.sequence_length,
                    agreed=session.fleet.group.share,
                )
                text = "".join(text_of(tokens, tokenizer, begin))
            self.emit(SampleGenerated(step=self.step, prompt=prompt, text=text, final=True))

    def _save(self, *, wait: bool = False) -> None:
        """Save this step, after the checkpoint that is being written; unless ``wait``, return before it is on disk."""
        self._report_saved(wait=True)
        self.save_began_s = time.perf_counter()
        folder, keep = self.home / "checkpoints", self.settings.checkpoint.keep
        in_use = self.mirror.in_use if self.mirror else ()
        save_session(self.session, self.writer, folder, keep, in_use=in_use, copies=not wait)
        self.saved_at = self.step
        if wait:
            self._report_saved(wait=True)

    def _report_saved(self, *, wait: bool) -> None:
        """Report a checkpoint that has been written since. Call it on all ranks of a replica."""
        while self.mirror and self.mirror.sentences:
            self.emit(Note(step=self.step, text=self.mirror.sentences.pop(0)))
        if (path := self.writer.poll(wait=wait)) is None:
            return
        size_bytes, free_bytes = self.session.fleet.group.done_by_leader(
            lambda: [open_checkpoint(path).size_bytes, shutil.disk_usage(path).free]
        )
        if self.mirror:
            self.mirror.offer(path)
        save_s = time.perf_counter() - self.save_began_s
        self.emit(
            CheckpointSaved(step=self.step, path=str(path), size_bytes=size_bytes, save_s=save_s, free_bytes=free_bytes)
        )

    def _summary(self, evaluation: Evaluated | None, interrupted: str | None) -> dict[str, Any]:
        """Return the summary of the run as JSON. Call it on all ranks of a replica."""
        session, totals, settings = self.session, self.session.totals, self.settings
        first, model, replicas = session.replicas[0].diloco, session.replicas[0].model, session.num_replicas
        sent_bytes, received_bytes = session.traffic()
        spent_s, taken = totals.compute_s + totals.exchange_s, self.step - totals.missed_steps
        tokens = totals.sequences * settings.train.sequence_length  # in the steps that were taken here
        return {
            "heldout_loss": evaluation.heldout_loss if evaluation else None,
            "local_loss": evaluation.local_loss if evaluation else None,
            "sites_loss": evaluation.sites_loss if evaluation else None,
            "sites": evaluation.sites if evaluation else {},
            "perplexity": evaluation.perplexity if evaluation else None,
            "bits_per_byte": evaluation.bits_per_byte if evaluation else None,
            "tokens": session.tokens,
            "steps": self.step,
            "algorithm": settings.algorithm,
            "num_replicas": replicas,
            "parameters": model.num_parameters(),
            "sent_bytes_per_replica": sent_bytes,
            "received_bytes_per_replica": received_bytes,
            "joined_at_step": totals.joined_at or None,  # what follows is of the steps that this replica trained
            "trained_steps": taken,
            "data_parallel_bytes_per_replica": data_parallel_bytes(model.num_trained(), replicas, taken),
            "shared_start_steps": totals.shared_start_steps,
            "shared_start_sent_bytes_per_replica": totals.shared_start_sent_bytes if first else sent_bytes,
            "compute_utilization": session.compute_utilization(),
            "wall_s": totals.wall_s,
            "tokens_per_s": tokens / spent_s if spent_s else None,
            "model_flops_utilization": session.flops_utilization(spent_s, taken) if not session.pace.skips else None,
            "rounds_committed": first.rounds_committed if first else 0,
            "rounds_void": first.rounds_void if first else 0,
            "global_params_digest": session.global_digest(),
            "epochs": session.replicas[0].sampler.epochs,
            "interrupted": interrupted,
            "out": str(self.folder),
        }
