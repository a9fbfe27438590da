"""`DiLoCo` for any training loop. It reads as Algorithm 2: for each action of a step, a fragment is sent or merged."""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from diloco.algorithm import (
    AverageRule,
    Codec,
    FragmentLayout,
    Merge,
    MergeRule,
    OuterOptimizer,
    RoundId,
    Send,
    SyncSchedule,
    all_buffers,
    check_number,
    digest_state,
    holding,
    local_shard,
    named_parameters,
    reshard,
)
from diloco.errors import (
    CheckpointError,
    ConfigurationError,
    DivergedError,
    RoundVoidError,
    TransportError,
    ViewChangedError,
)
from diloco.events import Event, Note, RoundCommitted, RoundVoid
from diloco.outer.arguments import (
    FIRST_WEIGHTS,
    argument_facts,
    check_arguments,
    check_kind,
    check_kinds,
    complete,
    first_weights,
    frozen_facts,
    synchronised,
)
from diloco.outer.copies import Copies, bare_optimizer
from diloco.outer.fragment import Fragment
from diloco.outer.ranks import check_ranks
from diloco.outer.recovery import StateRecovery
from diloco.outer.shards import shard_ranks
from diloco.protocol import Average
from diloco.state_tree import readable_state
from diloco.transport import InProcessTransport, Transport, asked
from diloco.units import GOES_ON, diff


class DiLoCo:
    """Synchronises one replica of a model with the other replicas (DiLoCo; Streaming DiLoCo, Algorithm 2).

    Call `step` after every step of the inner optimizer, or `begin` and `finish` if several replicas share a thread. All
    replicas must start from the same weights and use the same arguments, except ``weight``, ``global_device`` and
    ``on_event``. The constructor compares the arguments with those of the other replicas, for which it waits.

    Args:
        model: Any module. Its trainable parameters (float32, bfloat16 or float16) are synchronised and its persistent
            floating-point buffers averaged. It may be compiled or wrapped (DDP, FSDP2, checkpointing): names stay
            those of the plain model. Parameters and buffers must not be added, replaced or resized afterwards.
        inner_optimizer: The optimizer or optimizers of the model, which together hold every trainable parameter.
        transport: The connection of this replica to the others. None runs the same algorithm with a single replica.
        schedule: When fragments are sent and merged. Default: H = 100, one fragment, no overlap.
        fragments: A partition of the parameters, made by `partition`. Default: strided, as many as in the schedule.
        outer_optimizer: The optimizer of the global parameters. Default: Nesterov with momentum 0.9 and the papers'
            learning rates, 0.7 for one fragment and 0.4 for several.
        merge: How local parameters adopt new global ones. Default: with overlap `RebaseMerge`, else `AlphaMerge`.
        codec: The codec of the contributions, or its name. Default: float32.
        error_feedback: The fraction of the quantisation error that is added to the next contribution. True or 1 keeps
            all of it, 0.95 lets it decay slowly, False drops it. Costs 4 bytes per parameter.
        global_device: The device of the global parameters and the outer state, e.g. "cpu". None: the model's device.
        weight: The weight of this replica in the mean, which is multiplied by the fraction of the window that it has
            trained. Set it if replicas have different batch sizes.
        at_home: Parts of the names of parameters and buffers that each replica keeps to itself, such as "lm_head" or
            "layers.0". They are in no fragment, trained like all others, and never sent, also to a replica that joins.
            They may begin with other values on each replica. Default: none.
        max_norm: The largest L2 norm of a contribution; a larger one is scaled down to it. None: no bound.
        isotropic: Whether to give the mean of each hidden matrix about equal singular values before the outer step (see
            `isotropic`, IsoLoCo), which helps with AdamW inside. The updates of Muon already have such values.
        average: The rule that averages contributions, such as `SendersMean`. None: the weighted mean.
        mean_codec: How means are encoded in rounds in which each replica sums a part of the values (see
            `plan_exchange`): a codec, its name, or "auto". "auto" is int8 among at least 8 replicas whose contributions
            take less than 16 bits per value, else float32; int8 or fp4 where uplinks are too slow for that.
        on_event: Called with `RoundSent`, `RoundCommitted`, `RoundVoid` and `StateFetched`, and with a `Note` for every
            other failure. None warns of failures, once for each reason.
        compare_arguments: Whether to compare the arguments with the other replicas. False if the caller has done so.
        compare_weights: Whether to compare the first weights as well. False if the run goes on from a saved state, and
            the model already has the local weights of this replica. If the inner optimizer has a state, they are
            compared only in the first step, unless `load_state_dict` or `take_over` was called before.
        global_state_of: Another replica of this process, whose global parameters and outer state this one uses instead
            of its own. Both must start from the same weights, and take turns in one thread.

    Raises:
        ConfigurationError: if arguments contradict each other, or differ between two replicas: then both raise it. Also
            if something communicates among several replicas at every step, such as DistributedDataParallel.
        RendezvousError: if another replica is connected but does not construct its `DiLoCo` within the round time-out.

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
        fragments: Sequence[FragmentLayout] | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        merge: MergeRule | None = None,
        codec: Codec | str = "float32",
        error_feedback: bool | float = False,
        global_device: torch.device | str | None = None,
        weight: float = 1.0,
        at_home: Sequence[str] = (),
        max_norm: float | None = None,
        average: AverageRule | None = None,
        isotropic: bool = False,
        mean_codec: Codec | str = "auto",
        on_event: Callable[[Event], None] | None = None,
        compare_arguments: bool = True,
        compare_weights: bool = True,
        global_state_of: DiLoCo | None = None,
    ) -> None:
        arguments = complete(
            model=model,
            inner_optimizer=inner_optimizer,
            transport=transport,
            schedule=schedule,
            fragments=fragments,
            outer_optimizer=outer_optimizer,
            merge=merge,
            codec=codec,
            error_feedback=error_feedback,
            global_device=global_device,
            weight=weight,
            at_home=at_home,
            max_norm=max_norm,
            average=average,
            isotropic=isotropic,
            mean_codec=mean_codec,
            on_event=on_event,
            compare_arguments=compare_arguments,
            compare_weights=compare_weights,
        )
        check_kind("global_state_of", global_state_of, DiLoCo | None)
        check_arguments(arguments)
        self.model = model
        self.transport = transport or InProcessTransport(1).endpoint(0)
        self.schedule = arguments.schedule
        self.weight = weight
        self.steps = 0
        self._optimizers = inner_optimizer if isinstance(inner_optimizer, Sequence) else [inner_optimizer]
        self._ranks = shard_ranks(model)
        copies = Copies(self._optimizers)
        shared = {} if global_state_of is None else {each.index: each.state for each in global_state_of.fragments}
        self.fragments: tuple[Fragment, ...] = tuple(
            Fragment(layout, arguments, self._ranks, copies, shared.get(layout.index)) for layout in arguments.fragments
        )
        self.at_home = arguments.at_home  # the whole names
        self._kept = {name: each for name, each in named_parameters(model).items() if name in self.at_home}
        self.recovery = StateRecovery(self.fragments, self.transport, self._ranks)
        self._listen = on_event or _Warnings()
        self._has_begun = False
        self._contributors, self._wait_s = 0, 0.0  # of the last committed round, and of all
        self._synchronised = synchronised(model, self.named_parameters())
        self._saved_facts = argument_facts(arguments, "saved")
        self._facts = argument_facts(arguments) | frozen_facts(model) if compare_arguments else {}
        compare_weights = compare_arguments and compare_weights and not self.transport.joining
        goes_on = any(bare_optimizer(each).state for each in self._optimizers)  # perhaps; see `load_state_dict`
        weights = first_weights(model, self.at_home) if compare_weights else GOES_ON
        self._weights_to_compare = weights if goes_on else GOES_ON
        self._publish_and_compare(self.transport, GOES_ON if goes_on else weights)
        self._note(*copies.doubts)

    def step(self, trained: float = 1.0) -> None:
        """Count an inner step, then send and merge the fragments that the schedule names. Only a merge can block.

        Args:
            trained: The fraction of the step that this replica trained: 1 for all of it, 0 if for example a gradient
                scaler skipped it. The weights of contributions depend on it.
        """
        self.begin(trained)
        self.finish()

    def begin(self, trained: float = 1.0) -> None:
        """Perform the first half of `step`: count the inner step and send the due fragments. Never blocks on others."""
        if not self._has_begun:
            self._has_begun = True
            # a wrapper may have come since the constructor, and `replicate` makes its own in the first forward pass
            check_ranks(self.model, self._optimizers, self.transport)
        if (weights := self._weights_to_compare) != GOES_ON:
            self._weights_to_compare = GOES_ON
            self.transport.agree(self._facts | {FIRST_WEIGHTS: weights})
        if not 0 <= trained <= 1:  # at each step, where naming the fault would cost 10 us
            check_number("trained", trained, ge=0, le=1)
        actions = self.schedule.actions(self.steps + 1)
        # ranks that shard the parameters agree on what to adopt, which takes an exchange, so not at every step
        if not self._ranks.sharded or any(map(_is_send, actions)):
            self._note(*self.recovery.poll())
        for fragment in self.fragments:
            fragment.settle(wait=False)
            fragment.trained += trained
        self.steps += 1
        self.transport.tick()
        for action in itertools.takewhile(_is_send, actions):
            self._perform(action)
        for action in filter(_is_send, self.schedule.actions(self.steps + 1) if self.schedule.overlap_steps else ()):
            self.fragments[action.fragment].make_room(self.transport)

    def finish(self) -> None:
        """Perform the second half of `step`: wait for the due averages and merge them."""
        # where a fragment is merged a whole round late, it is sent again here, after its merge
        for action in itertools.dropwhile(_is_send, self.schedule.actions(self.steps)):
            self._perform(action)

    def figures(self) -> dict[str, float]:
        """Return name -> number for the logs of a framework: rounds, bytes, and seconds waited by this process."""
        return {
            "diloco/rounds": self.rounds_committed,
            "diloco/rounds_void": self.rounds_void,
            "diloco/contributors": self._contributors,
            "diloco/sent_bytes": self.transport.sent_bytes,
            "diloco/received_bytes": self.transport.received_bytes,
            "diloco/wait_s": self._wait_s,
        }

    def change_transport(self, transport: Transport) -> None:
        """Continue over another transport, unless a fragment is in flight or the new replicas have other arguments."""
        self._require_nothing_in_flight("changing the transport")
        check_kinds({"transport": transport})
        self._publish_and_compare(transport)
        self.transport = transport
        self.recovery.change_transport(transport)

    def take_over(self, donors: Sequence[int], *, keep_work: bool = False) -> None:
        """Adopt the global parameters and outer state of one of ``donors``. No fragment may be in flight.

        With ``keep_work`` the local parameters keep the work since the last merge, so that the next round shares it;
        else they become the global ones, and the buffers the agreed ones.
        """
        self._require_nothing_in_flight("taking over other replicas' state")
        self._weights_to_compare = GOES_ON
        for fetched in self.recovery.fetch_all(donors, keep_work=keep_work, step=self.steps):
            self._on_event(fetched)

    def drain(self, *, take_over: bool = True) -> None:
        """Merge every fragment in flight, in the order sent, and with ``take_over`` the states being fetched."""
        self.check_model()
        for round_id in self.in_flight:
            self._merge(self.fragments[round_id.fragment])
        if take_over:
            self._note(*self.recovery.poll(wait=True))

    def end(self) -> None:
        """Merge every fragment in flight and warn of fragments that the loop was too short to send."""
        self.drain()
        schedule, steps = self.schedule, self.steps
        unsent = [fragment.index for fragment in self.fragments if not schedule.rounds_of(fragment.index, steps)]
        if steps and unsent:
            which = "any fragment" if len(unsent) == len(self.fragments) else f"fragment {', '.join(map(str, unsent))}"
            warnings.warn(
                f"The loop ended after {steps} steps, before {which} was first sent (inner_steps="
                f"{schedule.inner_steps}). None of its work was shared and its global parameters have not moved.",
                stacklevel=3,
            )

    @property
    def in_flight(self) -> tuple[RoundId, ...]:
        """The rounds sent and not yet merged, in the order sent."""
        rounds = [fragment.flight.contribution.round for fragment in self.fragments if fragment.flight]
        return tuple(sorted(rounds, key=lambda r: (self.schedule.sent_at(r.fragment, r.outer_step), r.fragment)))

    @property
    def rounds_committed(self) -> int:
        """The number of averages applied so far."""
        return sum(fragment.committed for fragment in self.fragments)

    @property
    def rounds_void(self) -> int:
        """The number of rounds that no replica applied, or that this replica missed for lack of the others' state."""
        return sum(fragment.void for fragment in self.fragments)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return name -> synchronised parameter of the model and those at home, also if it has been frozen since."""
        reshard(self.model)
        return self._kept | {n: each for f in self.fragments for n, each in zip(f.names, f.parameters, strict=True)}

    def named_global_params(self) -> dict[str, torch.Tensor]:
        """Return name -> global value, float32 in the shape of this rank's shard: views, which must not be changed."""
        named = (fragment.layout.named(fragment.global_params).items() for fragment in self.fragments)
        return dict(itertools.chain.from_iterable(named))

    def local_values(self) -> dict[str, torch.Tensor]:
        """Return name -> this rank's part of each such parameter and each buffer, on the memory of the model."""
        named = self.named_parameters() | dict(all_buffers(self.model))
        return {name: local_shard(tensor) for name, tensor in named.items()}

    def global_values(self) -> dict[str, torch.Tensor]:
        """Return what the replicas have agreed on under the same names: global parameters, and buffers.

        The buffers are those of the last average, or at first those with which all replicas began. What stays at home
        is this replica's own.
        """
        return self.local_values() | self.named_global_params() | self.fragments[-1].named_buffers()

    def digest(self) -> str:
        """Return a digest of all global parameters, outer state and agreed buffers, as 32 hexadecimal digits.

        Each call reads them.

        Replicas that have finished the same rounds have the same digest. Compare it after the same step with nothing in
        flight: after the ``with`` block or after `drain`. If the ranks of a replica shard its parameters, each has the
        digest of its own shards.
        """
        states = [fragment.state for fragment in self.fragments]
        digests = [digest_state(state.values, state.outer, state.buffers) for state in states]
        return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()

    @contextmanager
    def global_model(self) -> Iterator[nn.Module]:
        """Put the global parameters and the agreed buffers into the model inside a ``with`` block.

        So what is evaluated or saved there is the same on all replicas, but for what stays at home. Persistent buffers,
        such as the running statistics of BatchNorm, are those of the last average. At the end of the block the local
        values come back.
        """
        self.check_model()
        with holding(self.local_values(), self.global_values()):
            try:
                yield self.model
            finally:
                reshard(self.model)

    def check_model(self) -> None:
        """Raise `ConfigurationError` if a parameter or buffer was added, replaced, resized or made trainable since."""
        if changed := sorted(self._synchronised ^ synchronised(self.model, self.named_parameters())):
            raise ConfigurationError(
                f"The model is no longer the one of which DiLoCo(...) was constructed: {', '.join(changed)} is gone or "
                "new, so it would not be synchronised. Change values in place, and add, resize or unfreeze before. If "
                "the first batch makes a buffer, run one before; if it is derived, use persistent=False."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state except the model and the inner optimizer, which the caller saves. Copies no tensors.

        It contains the global parameters, the outer state, the agreed buffers, the position in the schedule, the
        contributions in flight (submitting them again gives the same averages), the error-feedback residuals, the
        trained steps that no mean contains yet, and the counters.
        """
        fragments = [fragment.state_dict() for fragment in self.fragments]
        return {"about": self._saved_facts, "steps": self.steps, "fragments": fragments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state saved by `state_dict` and resubmit the rounds that were in flight.

        Raises:
            CheckpointError: if the state is malformed, or belongs to another schedule, partition, codec, merge rule or
                outer optimizer. The message names both values. Nothing was loaded.
        """
        self._require_nothing_in_flight("loading a state")
        if not isinstance(state, Mapping) or "about" not in state:
            raise CheckpointError("This is not a state of DiLoCo. Load what DiLoCo.state_dict() returned.")
        with readable_state("The state"):
            if words := diff(state["about"], self._saved_facts, "the saved state", "this run", self._saved_facts):
                raise CheckpointError(f"{words}; both need the same value. Nothing was loaded.")
            if (steps := int(state["steps"])) < 0:
                raise CheckpointError(f"The saved state has steps = {steps}. Nothing was loaded.")
            last = [self.schedule.rounds_of(fragment.index, steps) - 1 for fragment in self.fragments]
            loaders = [
                fragment.loader(saved, outer_step)
                for fragment, saved, outer_step in zip(self.fragments, state["fragments"], last, strict=True)
            ]
        self.recovery.change_transport(self.transport)  # what is being fetched does not belong to the loaded state
        self._weights_to_compare = GOES_ON
        self.steps = steps
        # contributions are submitted in the order in which they were sent
        for index in sorted(range(len(loaders)), key=lambda index: self.schedule.sent_at(index, last[index])):
            loaders[index](self.transport)

    def _perform(self, action: Send | Merge) -> None:
        self.check_model()
        fragment = self.fragments[action.fragment]
        if isinstance(action, Send):
            self._send(fragment, action.outer_step)
        elif fragment.flight is not None:
            self._merge(fragment)

    def _send(self, fragment: Fragment, outer_step: int) -> None:
        self.recovery.round_begins(fragment)
        window_steps = self.schedule.window_steps(fragment.index, outer_step)
        sent = fragment.send(self.transport, outer_step, self.steps, window_steps, base_weight=self.weight)
        self._on_event(sent)

    def _merge(self, fragment: Fragment) -> None:
        """Wait for the average of the fragment in flight and apply it. Work that it lacks is sent with the next.

        A round that is void for one rank that shards the parameters is void for all of them, as it is on all replicas.
        """
        assert fragment.flight is not None, "a round is in flight"
        error: TransportError | None = None
        if fragment.settle():
            text = f"Values of fragment {fragment.index} were outside the codec's range and were clamped to its limit."
            self._on_event(Note(step=self.steps, text=text))
        try:
            average = asked(self.transport, Average, "Pending.wait", fragment.flight.pending.wait)
        except (DivergedError, RoundVoidError) as void:
            error = void.with_traceback(None)  # which would keep this frame and its tensors
        diverged = error if isinstance(error, DivergedError) else None
        any_void, any_diverged = self._ranks.greatest([error is not None, diverged is not None])
        reason = ""
        if any_void:
            reason = str(error or "it is void for another rank of this replica")
            if isinstance(error, RoundVoidError):
                reason = error.reason
            if any_diverged:
                reason = f"{reason.rstrip('.')}. {self.recovery.resync(fragment, diverged)}"
        elif (average := fragment.received(average)).donor is not None:
            reason = self.recovery.round_missed(average, average.donor)
        if reason:
            changed, is_behind = isinstance(error, ViewChangedError), self.recovery.is_behind(fragment)
            return self._on_event(fragment.drop(self.steps, reason, view_changed=changed, is_behind=is_behind))
        committed = replace(fragment.merge(average, self.steps), peers=self.transport.traffic_by_peer())
        self._on_event(committed)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self._wait_s += event.wait_s
            self._contributors = len(event.contributors)
        self._listen(event)

    def _note(self, *texts: str) -> None:
        for text in texts:
            self._on_event(Note(step=self.steps, text=text))

    def _require_nothing_in_flight(self, what: str) -> None:
        if self.in_flight:
            rounds = "; ".join(map(str, self.in_flight))
            raise ConfigurationError(
                f"{what.capitalize()} needs every round to be merged, but {rounds} is in flight. Call drain() on every "
                "replica first. Nothing was changed."
            )

    def _publish_and_compare(self, transport: Transport, weights: str = GOES_ON) -> None:
        check_ranks(self.model, self._optimizers, transport)
        transport.publish(self.recovery.snapshot, self.recovery.version)
        if self._facts:
            transport.agree(self._facts | {FIRST_WEIGHTS: weights})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.end()


class _Warnings:
    """Stands in for a listener: it warns of failures, once for each reason."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()  # without their numbers

    def __call__(self, event: Event) -> None:
        match event:
            case RoundVoid():
                words = (
                    f"The round of fragment {event.fragment}, outer step {event.outer_step}, failed: "
                    f"{event.reason.rstrip('.')}. No replica applied it, and its work is sent again "
                    "with the next one. If every round fails, the replicas train apart: remove the cause."
                )
            case RoundCommitted(note=note) if note:
                words = f"A round was merged with a fault: {note}."
            case RoundCommitted(choice=choice) if choice:
                words = f"Rounds have changed: {choice}."
            case Note():
                words = event.text
            case _:
                return
        if (reason := re.sub(r"[\d.]+", "#", words)) not in self._reasons:
            self._reasons.add(reason)
            warnings.warn(
                f"{words.rstrip('.')}. (After step {event.step}; reported once for each reason. Pass an on_event to "
                "learn of every round; rounds_void and rounds_committed count them.)",
                stacklevel=6,
            )


def _is_send(action: Send | Merge) -> bool:
    return isinstance(action, Send)
