"""`DiLoCo`: three lines around any training loop, ours included.

For each action of the step, ``Send`` starts an average and ``Merge`` finishes one. Nothing here knows which variant of
the algorithm runs or what the network is; `diloco.outer.fragment_rounds` is what happens in a round.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from diloco.algorithm.average_rules import AverageRule
from diloco.algorithm.averaging import RoundId
from diloco.algorithm.clipping import UNCLIPPED, Clipping
from diloco.algorithm.codec import Codec, make_codec
from diloco.algorithm.fragments import Fragment, holding, partition
from diloco.algorithm.merge import AlphaMerge, MergeRule, RebaseMerge
from diloco.algorithm.outer_loop import OuterLoop
from diloco.algorithm.outer_optimizer import Nesterov, OuterOptimizer
from diloco.algorithm.schedule import Merge, Send, SyncSchedule
from diloco.algorithm.weighting import check_base_weight
from diloco.events import Event, Note
from diloco.outer.arguments import Arguments, check_arguments, check_saved_facts
from diloco.outer.fragment_rounds import FragmentRounds
from diloco.transport.base import Transport
from diloco.transport.in_process import InProcessTransport

__all__ = ["DiLoCo"]


class DiLoCo:
    """Keeps one replica of a model in step with the others (DiLoCo; Streaming DiLoCo, Algorithm 2).

    Call `step` after every step of the inner optimizer, or `begin` and `finish` where replicas share a thread. All
    replicas must start from the same weights and with the same arguments, except ``weight``, ``global_device`` and
    ``on_event``. The constructor compares arguments with the other replicas, and waits for those in other processes.

    Args:
        model: any module; its trainable parameters are synchronised, its floating buffers averaged.
        inner_optimizer: the optimizer (or optimizers) that train it. Together they must hold every trainable parameter.
        transport: this replica's way to the others; None: it is alone, and the algorithm is the same.
        schedule: when fragments are sent and merged; default: H = 100, one fragment, no overlap.
        fragments: a partition made by `partition`; default: strided, with the schedule's number of fragments.
        outer_optimizer: default: Nesterov with lr 0.7 for one fragment, 0.4 for several (the papers'), momentum 0.9.
        merge: default: with overlap `RebaseMerge`, which keeps the drift of the overlapped steps, else `AlphaMerge`.
        codec: a codec or its name; default: float32.
        error_feedback: how much of what the codec loses is kept for the next round, 4 bytes per parameter: True or 1
            all of it, 0.95 forgets slowly, False nothing.
        global_device: where global parameters and outer state live, e.g. "cpu"; None: beside the model.
        weight: of this replica in a mean, for a full window of training. It is multiplied by the fraction of the window
            that the replica trained. Give it where replicas have different batch sizes.
        clipping: the largest contribution, the same on all replicas; default: no limit.
        average: how contributions are averaged; None: their weighted mean. `Rda` and `SendersMean` are others.
        telemetry: whether each round is measured, for `RoundCommitted`: norms, cosines, gain and spread.
        mean_codec: how means are encoded where each replica sums a part of the values (`plan_exchange`): as ``codec``,
            or "auto", int8 among 8 replicas or more whose contributions take less than 16 bits a value, else float32.
        mean_error_feedback: how much of what ``mean_codec`` loses is kept for the next mean, as ``error_feedback``; by
            whoever summed, 4 / M bytes per parameter.
        on_event: called with `RoundSent`, `RoundCommitted`, `RoundVoid` and `StateFetched`, and with a `Note` of any
            other failure.
        compare_arguments: whether to compare these arguments with the other replicas'; False if that is already done.

    Raises:
        ConfigurationError: if arguments do not work together, or differ between two replicas, which both raise;
            `FragmentError` names the parameters.
        RendezvousError: if another replica is connected but does not get here within the time-out of a round.

    >>> model = nn.Linear(2, 1)
    >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with DiLoCo(model, inner, schedule=SyncSchedule(inner_steps=2)) as diloco:
    ...     for _ in range(4):
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         inner.step(); inner.zero_grad()
    ...         diloco.step()
    >>> diloco.rounds_committed
    2
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer | Sequence[Optimizer],
        *,
        transport: Transport | None = None,
        schedule: SyncSchedule | None = None,
        fragments: Sequence[Fragment] | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        merge: MergeRule | None = None,
        codec: Codec | str = "float32",
        error_feedback: bool | float = False,
        global_device: torch.device | str | None = None,
        weight: float = 1.0,
        clipping: Clipping | None = None,
        average: AverageRule | None = None,
        telemetry: bool = True,
        mean_codec: Codec | str = "auto",
        mean_error_feedback: bool | float = False,
        on_event: Callable[[Event], None] | None = None,
        compare_arguments: bool = True,
    ) -> None:
        self.model = model
        self.transport = transport or InProcessTransport(1).endpoint(0)
        self.schedule = schedule or SyncSchedule(inner_steps=100)
        self.fragments = tuple(fragments or partition(model, num_fragments=self.schedule.num_fragments))
        self.weight = check_base_weight(weight)
        self.steps = 0
        arguments = Arguments(
            schedule=self.schedule,
            fragments=self.fragments,
            outer_optimizer=outer_optimizer or Nesterov(learning_rate=0.7 if len(self.fragments) == 1 else 0.4),
            merge=merge or (RebaseMerge() if self.schedule.overlap_steps else AlphaMerge()),
            codec=make_codec(codec) if isinstance(codec, str) else codec,
            error_feedback=error_feedback,
            clipping=clipping or UNCLIPPED,
            average=average,
            telemetry=telemetry,
            mean_codec=mean_codec,
            mean_error_feedback=mean_error_feedback,
        )
        check_arguments(model, inner_optimizer, arguments)
        device = None if global_device is None else torch.device(global_device)
        self.outer_loop = OuterLoop(model, self.fragments, arguments.outer_optimizer, device)
        self._on_event = on_event or (lambda event: None)
        self._rounds = FragmentRounds(model, self.outer_loop, self.transport, arguments)
        self.shared = self._rounds.shared
        self._about = arguments.saved_facts(self._rounds.codecs[0])
        self._facts = arguments.facts(model) if compare_arguments else {}
        self._introduce()

    def step(self, trained: float = 1.0) -> None:
        """Count an inner step, then send and merge what the schedule says. Blocks only in a merge.

        Args:
            trained: how much of the step this replica trained: 1 for all of it, 0 for nothing, as when a gradient
                scaler skipped it. Contributions weigh by it.
        """
        self.begin(trained)
        self.finish()

    def begin(self, trained: float = 1.0) -> None:
        """The first half of `step`: count the inner step and send what is due. Never blocks on other replicas.

        What is sent only after a merge (``overlap_steps`` = ``inner_steps``) is left to `finish`.
        """
        self._take_over_what_came()
        self._rounds.trained_steps.add(trained)
        self.steps += 1
        self.transport.tick()
        for action in itertools.takewhile(_is_send, self.schedule.actions(self.steps)):
            self._perform(action)

    def finish(self) -> None:
        """The second half of `step`: wait for the averages that are due, and merge them."""
        for action in itertools.dropwhile(_is_send, self.schedule.actions(self.steps)):
            self._perform(action)

    def change_transport(self, transport: Transport) -> None:
        """Go on over another transport, with nothing in flight.

        Raises:
            ConfigurationError: if arguments are compared, and the replicas there have others.
        """
        self.transport = transport
        self._rounds.change_transport(transport)
        self._introduce()

    def take_over(self, donors: Sequence[int], *, keep_work: bool = False) -> None:
        """Replace global parameters and outer state by those of other replicas.

        Args:
            donors: members to ask.
            keep_work: whether this replica's work since its last merge stays in its local parameters, to be shared in
                the next round; else the local parameters become the global ones.

        Raises:
            TransportError: if none of ``donors`` answers.
        """
        self._rounds.forget_means()
        for fetched in self._rounds.taking_over.all_from(donors, keep_work=keep_work, step=self.steps):
            if fetched.here and not keep_work:
                self._rounds.trained_steps.forget(fetched.fragment)
            self._on_event(fetched)

    def begin_from_global(self) -> None:
        """Begin as a replica that has done nothing yet: the local parameters become the global ones."""
        for fragment in self.fragments:
            self._rounds.trained_steps.forget(fragment.index)
            self.outer_loop.merge(fragment.index, AlphaMerge(), None)
        self._rounds.forget_losses()

    def drain(self, *, take_over: bool = True) -> None:
        """Merge every fragment in flight at once, in the order sent; for the end of a run.

        Args:
            take_over: whether to wait for state that is on its way from others; False where it will be fetched anew.
        """
        for round_id in self.in_flight:
            self._on_event(self._rounds.merge(round_id.fragment, step=self.steps))
        if take_over:
            self._take_over_what_came(wait=True)

    def end(self) -> None:
        """Merge every fragment in flight, as the loop is over; warn of fragments that it was too short to send."""
        self.drain()
        schedule, steps = self.schedule, self.steps
        unsent = [fragment.index for fragment in self.fragments if not schedule.rounds_of(fragment.index, steps)]
        if steps and unsent:
            which = "any fragment" if len(unsent) == len(self.fragments) else f"fragment {', '.join(map(str, unsent))}"
            warnings.warn(
                f"The loop ended after {steps} steps, before {which} was first sent (inner_steps="
                f"{schedule.inner_steps}): nothing of it was shared, and its global parameters have not moved.",
                stacklevel=3,
            )

    @property
    def in_flight(self) -> tuple[RoundId, ...]:
        """Rounds sent and not yet merged, in the order sent."""
        return self._rounds.in_flight

    @property
    def rounds_committed(self) -> int:
        """Averages applied so far."""
        return self._rounds.committed

    @property
    def rounds_void(self) -> int:
        """Rounds so far that nobody applied, or whose state this replica did not hold."""
        return self._rounds.void

    def digest(self) -> str:
        """A digest of all global parameters and outer state, 32 hexadecimal digits: do the replicas agree?

        It is the same on all replicas that have been through the same rounds, so compare it after the same step, with
        nothing in flight (after the ``with``, or after `drain`). Where the ranks of a replica share its parameters
        out, each has a digest of its own part, the same as the rank at that position of every other replica. It reads
        all of that state; local parameters do not count.
        """
        digests = [self.outer_loop.digest(fragment.index) for fragment in self.fragments]
        return xxhash.xxh3_128_hexdigest("\n".join(digests).encode())

    def global_model(self) -> AbstractContextManager[nn.Module]:
        """Inside, the model holds the global parameters (for evaluation or export); afterwards its local ones again."""
        return holding(self.model, self.outer_loop.named_global_params())

    def state_dict(self) -> dict[str, Any]:
        """Everything except the model and inner optimizer, which are saved beside it; tensors are not copied.

        Global parameters, outer state, position in the schedule, fragments in flight (what was sent, so that the same
        average is made again), error-feedback residuals, steps trained that no mean has taken, counters.
        """
        return {"about": dict(self._about), "steps": self.steps, **self._rounds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the transport is given again what was in flight.

        Raises:
            CheckpointError: if the state is of another schedule, partition, codec or merge rule; it names both sides.
        """
        check_saved_facts(state["about"], self._about)
        unheld = self._rounds.load_state_dict(state)
        self.steps = int(state["steps"])
        for words in unheld:
            self._on_event(Note(step=self.steps, text=words))

    def _perform(self, action: Send | Merge) -> None:
        match action:
            case Send(fragment, outer_step):
                self._on_event(self._rounds.send(RoundId(fragment, outer_step), self.weight, step=self.steps))
            case Merge(fragment) if any(fragment == round_id.fragment for round_id in self.in_flight):
                self._on_event(self._rounds.merge(fragment, step=self.steps))

    def _introduce(self) -> None:
        """Offer the state to others on the transport, and compare arguments with them."""
        self.transport.publish(self.shared.snapshot, self.shared.version)
        if self._facts:
            self.transport.agree(self._facts)

    def _take_over_what_came(self, *, wait: bool = False) -> None:
        for failure in self._rounds.taking_over.poll(wait=wait):
            self._on_event(Note(step=self.steps, text=failure))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """As `end`, unless an error is on its way out."""
        if kind is None:
            self.end()


def _is_send(action: Send | Merge) -> bool:
    return isinstance(action, Send)
