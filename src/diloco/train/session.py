"""A session: the replicas of this process and their training steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from diloco.algorithm import digest_tensors, make_codec
from diloco.checkpoint import Lazy, whole
from diloco.data import Corpus, Drawing
from diloco.devices import flops_utilization, known_peak_flops_per_s, release_memory
from diloco.errors import RoundVoidError
from diloco.events import Event, Note, RoundCommitted, StepFinished
from diloco.model import ENDS, LanguageModel, build_language_model
from diloco.outer import DiLoCo, check_arguments, complete
from diloco.signals import StopRequest
from diloco.train.description import outer_arguments
from diloco.train.fleet import Fleet
from diloco.train.inner import InnerLoop, InnerStep, inner_learning_rate, make_inner_optimizer
from diloco.train.pace import EveryStep
from diloco.train.parallel import Strategy, parallelise, prepare_model
from diloco.train.replica import (
    GradientAverager,
    RandomState,
    Replica,
    SharedStart,
    average_gradients,
)
from diloco.train.same_weights import agree_on_weights
from diloco.train.settings import RunSettings
from diloco.train.state import ReplicaState
from diloco.trained import load_parameters
from diloco.transport import Transport


@dataclass
class Totals:
    """Sums over the run, saved in checkpoints."""

    steps: int = 0
    wall_s: float = 0.0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    shared_start_sent_bytes: int = 0
    sequences: int = 0  # of all replicas, in the steps that this one took
    shared_start_steps: int = 0  # that this one took
    joined_at: int = 0  # the step at which this one last joined the others; 0: never
    most_members: int = 0  # replicas that trained at once, as far as this one knows
    missed_steps: int = 0  # taken by the others while this replica wasn't a member
    missed_sequences: int = 0
    best_heldout_loss: float | None = None


class Session:
    """The replicas of this process, which take turns: a step begins on all replicas before it is finished on any.

    Args:
        settings: resolved settings.
        initial: initial values of the parameters by name; None: new values, or those of the model's source.
        identity: what the run is; see `diloco.train.description`.
        beside: further states to publish, which never change, by number.
    """

    def __init__(
        self,
        settings: RunSettings,
        corpus: Corpus,
        fleet: Fleet,
        device: torch.device,
        on_event: Callable[[Event], None],
        initial: Mapping[str, Tensor] | None = None,
        identity: Mapping[str, str] | None = None,
        beside: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.settings = settings
        self._beside = beside or {}
        self.corpus = corpus
        self.fleet = fleet
        self.device = device
        self.on_event = on_event
        self.identity = identity or {}
        self.totals = Totals()
        self.replicas: list[Replica] = []
        for transport in fleet.transports:
            self.replicas.append(self._make_replica(transport, initial))
        self.pace = EveryStep()  # chooses the scheduled steps to train
        self.agreed_step = 0  # the last step that all replicas are known to have finished
        self._loss = 0.0
        self._inner: tuple[InnerStep, ...] = ()  # results of the last trained step
        if self.averages_gradients and settings.algorithm != "data-parallel":  # else `DiLoCo` would refuse them later
            model, optimizer = self.replicas[0].model, self.replicas[0].inner.optimizer
            outer = outer_arguments(settings, model)
            check_arguments(complete(model=model, inner_optimizer=optimizer, **outer))
        self._end_shared_start_if_due()

    @property
    def averages_gradients(self) -> bool:
        """Whether the next step averages gradients: always with data-parallel, else until an outer loop begins."""
        shared_start = self.settings.train.data_parallel_steps
        begun = any(replica.diloco for replica in self.replicas)
        return self.settings.algorithm == "data-parallel" or (self.totals.steps < shared_start and not begun)

    @property
    def may_lose_others(self) -> bool:
        """Whether this process goes on after losing the other replicas."""
        return False

    def open_to_joiners(self) -> None:
        """Admit joining replicas, unless the replicas average gradients at every step. Here nobody can join."""

    def follow_views(self, stop: StopRequest) -> None:
        """Follow the members that come and go since the last step. Here all stay."""

    def step(self, look: Callable[[], None] = lambda: None) -> StepFinished:
        """Run one scheduled inner step of every replica, ``look`` at it, and run the synchronisation that is due then.

        A step that `DynamicSteps` skips only advances the schedule; loss and norm are those of the last trained step.
        """
        started_s = time.perf_counter()
        step, pace = self.totals.steps, EveryStep() if self.averages_gradients else self.pace
        self._divide_data()
        trained, averaging_s = not self._inner or pace.trains(step), 0.0
        if trained:
            averaging_s = self._train(step)
        elif not self.settings.data.local:  # nobody else could draw the batch
            for replica in self.replicas:
                replica.sampler.skip_batch()
        self.totals.shared_start_steps += self.averages_gradients and self.settings.algorithm != "data-parallel"
        self.totals.most_members = max(self.totals.most_members, self.fleet.num_members)
        members = pace.num_training(step, self.fleet.transport.view.members, trained=trained)
        self._count_step(members)
        stepped_s = time.perf_counter()
        look()
        looked_s = time.perf_counter()
        self._synchronise(trained=trained)
        finished_s = time.perf_counter()
        train, data_parallel = self.settings.train, self.settings.algorithm == "data-parallel"
        last_shared = train.steps if data_parallel else train.data_parallel_steps
        if self.totals.steps == last_shared and self.replicas[0].diloco is None:
            self.agree_on_weights()  # optimizers round otherwise on another processor
        self._end_shared_start_if_due()
        compute_s = stepped_s - started_s - averaging_s
        self.totals.compute_s += compute_s
        self.totals.exchange_s += averaging_s + finished_s - looked_s
        if self.averages_gradients:
            self.open_to_joiners()  # once the shared start has ended, which takes less time from step to step
        if trained:
            pace.trained(compute_s)
        pace.announce(self.totals.steps)
        sent_bytes, received_bytes = self.traffic()
        step_s = time.perf_counter() - started_s - (looked_s - stepped_s)
        return StepFinished(
            step=self.totals.steps,
            loss=self._loss,
            learning_rate=self._inner[0].learning_rate,
            gradient_norm=sum(done.gradient_norm for done in self._inner) / len(self._inner),
            tokens=self.tokens,
            step_s=step_s,
            tokens_per_s=members
            * self.settings.train.batch_size
            * self.settings.train.sequence_length
            / max(1e-9, step_s),
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            compute_utilization=self.compute_utilization(),
            skipped_replicas=sum(done.skipped for done in self._inner) if trained else 0,
            trained=trained,
            pace=pace.fraction,
            epoch=self.epoch,
            model_flops_utilization=self.flops_utilization(step_s) if trained else None,
        )

    @property
    def at_home(self) -> Sequence[str]:
        """The names of what each replica keeps to itself."""
        diloco = self.replicas[0].diloco
        return diloco.at_home if diloco else ()

    @property
    def epoch(self) -> int:
        """The pass over the data, from 1."""
        return int(self.replicas[0].sampler.epochs) + 1

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the run."""
        return self.settings.network.replicas

    @property
    def sequences_per_step(self) -> int:
        """The number of sequences per step of all current replicas."""
        return self.fleet.num_members * self.settings.train.batch_size

    @property
    def tokens(self) -> int:
        """The number of tokens trained so far by all replicas together."""
        return (self.totals.sequences + self.totals.missed_sequences) * self.settings.train.sequence_length

    @cached_property
    def flops_per_token(self) -> float:
        """The operations of training the model on one token; recomputed activations do not count."""
        return self.replicas[0].model.flops_per_token(self.settings.train.sequence_length)

    @cached_property
    def peak_flops_per_s(self) -> float | None:
        """The peak operations per second of this process's device, or None if it is not known."""
        if self.device.type != "cuda":
            return None
        return known_peak_flops_per_s(torch.cuda.get_device_name(self.device), self.settings.train.precision)

    def flops_utilization(self, seconds: float, steps: int = 1) -> float | None:
        """Return the model flops utilisation of this process's device over ``steps``; None without a known peak."""
        train = self.settings.train
        tokens = len(self.replicas) * train.batch_size * train.sequence_length // self.fleet.group.size
        return flops_utilization(self.flops_per_token * tokens * steps, seconds, self.peak_flops_per_s)

    def agree_on_weights(self) -> None:
        """Go on with the weights of the first replica if any has others, where replicas in several processes begin."""
        fleet, first = self.fleet, self.replicas[0]
        if len(fleet.local) == fleet.num_members:
            return
        try:
            transport, step = first.gradients.transport, self.totals.steps
            sentence = agree_on_weights(first.model, first.inner.optimizer, transport, fleet.group, step, self.at_home)
        except RoundVoidError as error:
            sentence = f"{error} So it isn't known whether all replicas have the same weights."
        if sentence:
            self._note(sentence)
            if first.diloco is not None:  # its global parameters are the earlier weights
                first.diloco = None
                self.begin_diloco(first)

    def begin_diloco(self, replica: Replica) -> DiLoCo:
        """Return the outer loop of a replica, which begins with the replica's parameters as the global ones."""
        if replica.diloco is None:
            if replica.shared is not None:
                replica.inner, replica.shared = replica.shared.leave(), None
            # an Apple GPU lacks some operations of the codecs
            on_host = self.settings.train.global_device == "cpu" or replica.inner.device.type == "mps"
            replica.diloco = DiLoCo(
                replica.model,
                replica.inner.optimizer,
                transport=replica.gradients.transport,
                **outer_arguments(self.settings, replica.model),
                global_device="cpu" if on_host else None,
                weight=self.settings.sync.base_weight,
                on_event=self._emit,
                compare_arguments=False,  # the replicas compared their settings when they met
                global_state_of=self.replicas[0].diloco,
            )
            replica.diloco.recovery.begun_after = self.totals.steps
            replica.diloco.recovery.beside = self._beside
        return replica.diloco

    def end_shared_start(self) -> None:
        """Begin the outer loop of every replica."""
        self.totals.shared_start_sent_bytes = self.traffic()[0]
        release_memory()  # of gradients in flight
        for replica in self.replicas:
            self.begin_diloco(replica)
        release_memory()  # of copies of the optimizer's state

    def close(self) -> None:
        for replica in self.replicas:
            replica.sampler.close()

    def drain(self) -> None:
        """Merge all fragments in flight, at the end of a run."""
        self.fleet.end_steps()
        for replica in self.replicas:
            if replica.diloco:
                replica.diloco.drain()

    def _end_shared_start_if_due(self) -> None:
        due = self.settings.algorithm in ("streaming", "diloco") and not self.averages_gradients
        if due and self.replicas[0].diloco is None:
            self.end_shared_start()

    def global_params(self) -> dict[str, Tensor]:
        """Return what `ReplicaState.global_params` of the first replica does."""
        return ReplicaState(self.replicas[0].inner, self.replicas[0].diloco).global_params()

    def global_digest(self) -> str:
        """Return the digest of the global parameters. Call it on all ranks of a replica."""
        return digest_tensors(Lazy(self.global_params(), whole))

    @contextmanager
    def global_model(self) -> Iterator[LanguageModel]:
        """Yield the model with the global parameters."""
        first = self.replicas[0]
        with nullcontext() if first.diloco is None else first.diloco.global_model():
            yield first.model

    def compute_utilization(self) -> float:
        """Return compute time / (compute time + time stalled by the exchange), as the mean over replicas.

        On emulated links the times are virtual; else they are those of this process, with encoding and merging.
        """
        if (network := self.fleet.transport.network) is not None:
            return sum(map(network.compute_utilization, self.fleet.local)) / len(self.replicas)
        total_s = self.totals.compute_s + self.totals.exchange_s
        return self.totals.compute_s / total_s if total_s else 1.0

    def traffic(self) -> tuple[int, int]:
        """Return the bytes sent and received so far, each the mean over the replicas of this process."""
        transports = self.fleet.transports
        sent = sum(transport.sent_bytes for transport in transports) // len(transports)
        return sent, sum(transport.received_bytes for transport in transports) // len(transports)

    def _divide_data(self) -> None:
        """Take over how the data is divided among the members since the last step. Here that never changes."""

    def _count_step(self, members: int) -> None:
        """Count a step that so many members have trained."""
        self.totals.steps += 1
        self.totals.sequences += members * self.settings.train.batch_size

    def _train(self, step: int) -> float:
        """Train inner step ``step`` on every replica and return the seconds spent averaging gradients."""
        losses, averaging_s = [], 0.0
        averaging = self.replicas if self.averages_gradients else []
        done: list[InnerStep] = []
        for replica in self.replicas:
            losses.append(self._accumulate(replica))
            if averaging:
                averaging_s += self._send_gradients(replica, step)
            elif self.device.type == "cpu":  # apply at once, as waiting costs nothing and gradients need not be kept
                done.append(replica.inner.apply(step))
        if done:
            self._loss = float(torch.stack(losses).mean())
        else:
            computed_s = time.perf_counter()
            may_skip = self.replicas[0].inner.scaler.is_enabled()
            may_lose = self.may_lose_others and self.settings.algorithm != "data-parallel"
            keep = average_gradients([r.gradients for r in averaging], self._emit, may_skip=may_skip, may_lose=may_lose)
            averaging_s += time.perf_counter() - computed_s
            self.agreed_step = step + 1 if averaging and keep else self.agreed_step
            # queue the work of all replicas on the device and wait for it once, whatever their number
            inners = dict.fromkeys(replica.inner for replica in self.replicas)
            norms = [inner.begin(step, skip=not keep) for inner in inners]
            self._loss, *read = torch.stack([torch.stack(losses).mean(), *norms]).tolist()
            ends = {inner: inner.end(step, norm, skip=not keep) for inner, norm in zip(inners, read, strict=True)}
            done = [ends[replica.inner] for replica in self.replicas]
        self._inner = tuple(done)
        return averaging_s

    def _synchronise(self, *, trained: bool) -> None:
        for replica, done in zip(self.replicas, self._inner, strict=True):
            if replica.diloco:
                with replica.random_state.active():
                    replica.diloco.begin(self._weight_of_step(replica, trained=trained and not done.skipped))
        for replica in self.replicas:
            if replica.diloco:
                replica.diloco.finish()

    def _accumulate(self, replica: Replica) -> Tensor:
        tokens, targets = replica.sampler.next_batch()
        with replica.random_state.active():
            loss = replica.inner.accumulate_gradients(tokens, targets)
        replica.inner.unscale()
        return loss

    def _send_gradients(self, replica: Replica, step: int) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # otherwise the time would include pending compute
        started_s = time.perf_counter()
        replica.gradients.begin(step, self._weight_of_step(replica))
        return time.perf_counter() - started_s

    def _make_replica(self, transport: Transport, initial: Mapping[str, Tensor] | None) -> Replica:
        settings, shared = self.settings, self.replicas[0].shared if self.replicas else None
        if shared is None or not (self.averages_gradients and shared.serves_all):
            shared = SharedStart(self._make_inner, initial)
        inner = shared.inner
        drawing: Drawing = {
            "sequence_length": settings.train.sequence_length,
            "batch_size": settings.train.batch_size,
            "seed": settings.seed,
            "replica": transport.replica,
            "num_replicas": None if self.fleet.elastic else settings.network.replicas,
        }
        if settings.data.local:  # all of it is this replica's; copies of another's are drawn in another order
            drawing |= {"seed": settings.seed + transport.replica, "replica": 0, "num_replicas": 1}
        batches = self.corpus.batches(**drawing)
        codec = "float32"
        if settings.algorithm == "data-parallel" and settings.sync.codec is not None:
            codec = settings.sync.codec
        gradients = GradientAverager(
            inner.model, transport, make_codec(codec), self.fleet.group, settings.sync.base_weight
        )
        random_state = RandomState(settings.seed, transport.replica)
        return Replica(transport.replica, inner, shared, batches, random_state, gradients)

    def _weight_of_step(self, replica: Replica, *, trained: bool = True) -> float:
        """Return what a step adds to the weight of a replica, which may not have trained it: 1 for a whole step."""
        if self.settings.sync.weight == "equal":
            return 1.0
        return replica.inner.counted if trained else 0.0

    def _make_inner(self, initial: Mapping[str, Tensor] | None) -> InnerLoop:
        settings, train, group = self.settings, self.settings.train, self.fleet.group
        strategy: Strategy = train.parallelism if group.size > 1 else "none"
        # no rank may have room for the whole model; but code of the user and bitsandbytes need real memory
        on_meta = strategy == "fsdp" and settings.model.kind != "module" and settings.model.quantization is None
        device = "cpu" if strategy == "fsdp" else self.device
        if on_meta:
            device = "meta"
        model = build_language_model(settings.model, seed=settings.seed, device=device)
        prepare_model(model, train)
        parallel = parallelise(model, strategy, group, self.device, train.precision)
        if on_meta:
            model.fill(self.device, seed=settings.seed, group=group)
        if initial is not None:
            load_parameters(model, initial)
        end = self.corpus.tokenizer.eos_id if settings.data.document_masks else None
        end = ENDS if self.corpus.train.marks_ends else end
        if end is not None:
            model.keep_documents_apart()
        return InnerLoop(
            parallel,
            make_inner_optimizer(settings.optimizer, model, group, compiled=train.compile),
            learning_rate=inner_learning_rate(settings.optimizer, train.steps),
            clip_norm=settings.optimizer.clip_norm,
            precision=train.precision,
            accumulation=train.gradient_accumulation,
            end_of_document=end,
        )

    def _emit(self, event: Event) -> None:
        diloco = self.replicas[0].diloco
        if isinstance(event, RoundCommitted) and diloco and {*diloco.transport.view.members} <= {*event.contributors}:
            sent = diloco.schedule.sent_at(event.fragment, event.outer_step)
            self.agreed_step = max(self.agreed_step, sent + diloco.recovery.begun_after)
        self.on_event(replace(event, step=self.totals.steps))

    def _note(self, text: str) -> None:
        self._emit(Note(step=0, text=text))
