"""One fragment of a model: what all replicas agree on about it, and what this replica still owes the others.

Streaming DiLoCo, Algorithm 2, for one fragment p::

    Delta_p  <- global_p - local_p                     line 7   send
    global_p <- OuterOpt(global_p, mean Delta_p)       line 11  merge
    local_p  <- merge(local_p, global_p)               line 12  merge

Permanent memory: 4 bytes per parameter for the global parameters and 4 for Nesterov's momentum, and 4 for the residual
of error feedback. A fragment in flight also keeps its payload and, with the rebase rule, 4 bytes per value. If the
ranks of a replica shard its parameters, each rank holds this for its own shards only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import (
    Contribution,
    FragmentLayout,
    MergeRule,
    RoundId,
    bind,
    collect_buffers,
    contribution_weight,
    encode_with_feedback,
    flatten,
    hidden_matrices,
    in_pieces,
    isotropic,
    largest_magnitude,
    local_shard,
    named_buffers,
    reshard,
    restore_buffers_,
    unflatten_,
)
from diloco.devices import empty
from diloco.errors import FragmentError, NonFiniteError, TransportError
from diloco.events import RoundCommitted, RoundSent, RoundVoid
from diloco.outer.arguments import Arguments
from diloco.outer.copies import Copies
from diloco.outer.shards import ShardRanks
from diloco.outer.state import Direction, GlobalState, buffers_of
from diloco.protocol import Average
from diloco.transport import BackgroundTransport, Pending, Transport, asked
from diloco.waiting import in_thread

_LEAST_LATER = 1 << 19  # values from which a thread encodes: starting one takes as long as encoding a tenth of them

_SAVED_FIELDS = ("payload", "weight", "base_weight", "digest", "buffers", "integers")
"""The fields that are saved of a contribution in flight."""

_COUNTERS = {"trained": float, "submitted": float, "committed": int, "void": int}


@dataclass(frozen=True, eq=False)
class InFlight:
    """A fragment's round between sending and merging."""

    contribution: Contribution  # submitted again after a resume, it gives the same average
    pending: Pending  # the average in flight
    sent: Tensor | None  # ``(numel,)`` float32, the local parameters when sent, if the merge rule needs them
    # of a thread that fills the payload, and returns the new residual and the largest magnitude; None if none has to
    ready: Future[tuple[Tensor | None, float]] | None = None


@dataclass(frozen=True, eq=False)
class _Encoding:
    """The payload of a contribution, which is complete or being filled by a thread."""

    payload: Tensor
    sent: Tensor | None  # as in `InFlight`
    candidate: Tensor | None = None
    largest: float = 0.0  # the largest magnitude of the pseudo-gradient, as far as it is known
    ready: Future[tuple[Tensor | None, float]] | None = None  # as in `InFlight`


def _same(mean: Tensor) -> Tensor:
    return mean


class Fragment:
    """The parameters of one replica that are sent together, their global state, and the work in no mean yet.

    The residual of error feedback and the number of trained steps follow the outcome of a round: they commit if the
    average contains this replica's contribution. Otherwise they carry over, as the next pseudo-gradient contains all of
    this work again.

    ``state`` is that of another replica in this process, if both share one.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        arguments: Arguments,
        ranks: ShardRanks,
        copies: Copies,
        state: GlobalState | None = None,
    ) -> None:
        self._model = arguments.model
        self._at_home = arguments.at_home
        self._merge = arguments.merge
        self._decay = float(arguments.error_feedback)
        self._ranks = ranks
        self._copies = copies
        # ranks that shard the parameters decide together whether all values are finite, so no thread does
        self._overlaps = arguments.schedule.overlap_steps > 0 and not ranks.sharded
        self._template = Contribution(  # what all contributions of the fragment share
            round=RoundId(layout.index, 0),
            replica=0,
            codec=arguments.codec,
            numel=layout.numel,
            payload=torch.empty(0, dtype=torch.uint8, device="cpu"),
            max_norm=arguments.max_norm,
            average_rule=arguments.average,
            tensors=layout.sizes,
            mean=arguments.mean_codec,
            transfer_steps=arguments.schedule.transfer_steps,
        )
        self.layout = layout
        self.index, self.names, self.numel = layout.index, layout.names, layout.numel  # p; the values of this rank
        self.parameters = bind(self._model, layout)
        device = arguments.global_device
        self.device = self.parameters[0].device if device is None else torch.device(device)
        self.carries_buffers = layout is arguments.fragments[-1]  # of the model
        matrices = hidden_matrices(self._model) if arguments.isotropic else {}
        direction = functools.partial(isotropic, layout=layout, matrices=matrices)
        # ranks that shard the parameters gather matrices, all at once in their training threads
        self._together: Direction | None = direction if ranks.sharded else None
        outer = arguments.outer_optimizer, _same if ranks.sharded else direction
        self.state = GlobalState(self.local(), *outer, self._local_buffers()) if state is None else state
        self.state.users += 1
        self.residual: Tensor | None = None  # e, ``(numel,)`` float32, of the last round that took this replica's work
        if self._decay:
            self.residual = torch.zeros(layout.numel, dtype=torch.float32, device=self.device)
        self._room: Future[Tensor] | None = None  # memory for the next copy of the local parameters
        self.candidate: Tensor | None = None  # e if the round in flight takes it
        self.trained = 0.0  # inner steps since the last contribution
        self.submitted = 0.0  # inner steps in a contribution and in no mean yet
        self.flight: InFlight | None = None
        self.committed = 0  # averages applied
        self.void = 0  # rounds that no replica applied, or that this one missed

    @property
    def global_params(self) -> Tensor:
        """``(numel,)`` float32, theta."""
        return self.state.values

    def local(self) -> Tensor:
        """Return a copy of the local parameters, ``(numel,)`` float32 on the device of the global ones."""
        return flatten(self.parameters, self._empty())

    def pseudo_gradient(
        self, local: Tensor | None = None, *, keep_local: bool = False
    ) -> tuple[Tensor, Tensor | None, float]:
        """Return ``Delta = global - local``, ``(numel,)`` float32 (Algorithm 2, line 7), and its largest magnitude.

        ``local`` is a copy of the local parameters, ``(numel,)`` float32; with ``keep_local`` it is not overwritten but
        returned. The magnitude is that of all ranks that shard the parameters.

        Raises:
            NonFiniteError: on all ranks, if Delta contains NaN or infinity on one. The message names the parameters.
        """
        local = self.local() if local is None else local
        delta, largest = self._empty() if keep_local else local, 0.0
        for values, mine, difference in in_pieces(self.global_params, local, delta):
            magnitude = largest_magnitude(torch.sub(values, mine, out=difference))
            largest = max(largest, magnitude) if math.isfinite(magnitude) else math.inf
        (largest,) = self._ranks.greatest([largest])
        if not math.isfinite(largest):
            raise self._not_finite(delta)
        return delta, local if keep_local else None, largest

    def send(
        self,
        transport: Transport,
        outer_step: int,
        step: int,
        window_steps: int,
        *,
        base_weight: float,
    ) -> RoundSent:
        """Submit the work of this replica to the transport after inner step ``step``. Never blocks on other replicas.

        With overlap, only copy the local parameters of a large fragment, and leave the rest to a thread, if the
        transport allows it. `settle` then raises the errors, and tells whether a value was out of range.

        ``window_steps`` is the number of inner steps that the schedule has since the previous round; ``base_weight`` is
        that of `Contribution`. The model's buffers travel with the last fragment.
        """
        if self.flight is not None:  # the caller goes on after `Pending.wait` has failed
            words = f"{self.flight.contribution.round} can't end: waiting for its average has failed"
            raise TransportError(f"{words}, so the fragment can't be sent again. Resume from a saved state.")
        encoding = self._encode_in_thread() if self._may_fill(transport) else self._encode_now()
        self.submitted, self.trained = self.submitted + self.trained, 0.0
        contribution = replace(
            self._template,
            round=RoundId(self.index, outer_step),
            replica=transport.replica,
            payload=encoding.payload,
            weight=contribution_weight(base_weight, self.submitted, window_steps),
            base_weight=base_weight,
            digest=self.state.digest(),
            **self._local_buffers(),
        )
        average = functools.partial(transport.average, contribution)
        if isinstance(transport, BackgroundTransport) and (encoding.ready is not None or self.device.type == "cuda"):
            average = functools.partial(transport.average, contribution, encoding.ready, self.state.prepare)
        pending = asked(transport, Pending, "average", average)
        self.flight = InFlight(contribution, pending, encoding.sent, encoding.ready)
        self.candidate = encoding.candidate  # after submitting, which may fail
        return RoundSent(
            step=step,
            replica=contribution.replica,
            **contribution.round._asdict(),
            payload_bytes=encoding.payload.numel(),
            saturated=encoding.largest > self._template.codec.saturation_limit,
            digest=contribution.digest,
            weight=contribution.weight,
        )

    def make_room(self, transport: Transport) -> None:
        """Let a thread take the memory that the next `send` copies to, because the first use of a page is slow."""
        if self._may_fill(transport):
            self._room = in_thread(lambda: self._empty().zero_(), "room", daemon=False)

    def _may_fill(self, transport: Transport) -> bool:
        later = self._overlaps and isinstance(transport, BackgroundTransport)
        return later and self.device.type == "cpu" and self.numel >= _LEAST_LATER

    def settle(self, *, wait: bool = True) -> bool:
        """Wait until the round in flight has been sent, and return whether a value was outside the codec's range.

        Without ``wait`` only ask whether it could not be sent.

        Raises:
            NonFiniteError: if the pseudo-gradient contains NaN or infinity. Nothing was sent.
        """
        ready = None if self.flight is None else self.flight.ready
        if ready is None or not (wait or ready.done()):
            return False
        try:
            self.candidate, largest = ready.result()
        except BaseException:
            self.flight = self.candidate = None
            raise
        return largest > self._template.codec.saturation_limit

    def _encode_now(self) -> _Encoding:
        delta, sent, largest = self.pseudo_gradient(keep_local=self._merge.keeps_sent)
        payload, candidate = self._encoded(delta)
        return _Encoding(payload, sent, candidate, largest)

    def _encode_in_thread(self) -> _Encoding:
        """Copy the local parameters, and let a thread compute the payload from the copy."""
        room = self._empty() if self._room is None else self._room.result()
        copying: set[torch.device] = set()
        local, self._room = flatten(self.parameters, room, copying), None
        copies = [torch.cuda.current_stream(device).record_event() for device in copying]
        payload = empty(self._template.codec.payload_bytes(self.numel), torch.uint8)
        ready = in_thread(lambda: self._fill(payload, local, copies), "encode", daemon=False)
        self.state.reader = ready
        return _Encoding(payload, local if self._merge.keeps_sent else None, ready=ready)

    def _fill(self, payload: Tensor, local: Tensor, copies: Sequence[torch.cuda.Event]) -> tuple[Tensor | None, float]:
        """Compute the payload once ``local`` has been copied from the GPUs. Return the candidate and the magnitude."""
        for copied in copies:
            copied.synchronize()
        delta, _, largest = self.pseudo_gradient(local, keep_local=self._merge.keeps_sent)
        encoded, candidate = self._encoded(delta)
        payload.copy_(encoded)
        return candidate, largest

    def _encoded(self, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        codec = self._template.codec
        if self.residual is None:
            return codec.encode(delta), None
        return encode_with_feedback(codec, delta, self.residual, self._decay)

    def received(self, average: Average) -> Average:
        """Return an average with an isotropic mean, if that takes all ranks of a sharded replica. Call it on all."""
        if self._together is None:
            return average
        return replace(average, values=self._together(self.state.outer_mean(average.values)))

    def merge(self, average: Average, step: int) -> RoundCommitted:
        """Take the outer step of the round in flight and merge the new global parameters into the local ones.

        If the average excludes this replica, its work stays in the local parameters. The buffers become the average's.
        """
        assert self.flight is not None, "a round is in flight"
        included = self.flight.contribution.replica in average.contributors
        excluded = len(average.contributors) < len(average.view.members)
        keep = not included or (excluded and self.state.users > 1)
        measures, before = self.state.take_step(average, keep=keep)
        if included:
            self.reset_local(self._merge, self.flight.sent)
            self.submitted = 0.0
            self.residual = self.residual if self.candidate is None else self.candidate
        else:
            assert before is not None, "kept above"
            self._carry_over(before)
        if buffers_of(average):
            self.reset_buffers()
        self.committed += 1
        contribution = self._land()
        return RoundCommitted(
            step=step,
            replica=contribution.replica,
            **contribution.round._asdict(),
            weight=contribution.weight,
            digest=contribution.digest,
            view=average.view.id,
            contributors=average.contributors,
            total_weight=average.weight,
            sent_bytes=average.sent_bytes,
            received_bytes=average.received_bytes,
            wait_s=average.wait_s,
            late_s=average.late_s,
            clipped=average.clipped,
            note=average.note,
            choice=average.choice,
            **measures,
        )

    def drop(self, step: int, reason: str, *, view_changed: bool = False, is_behind: bool = False) -> RoundVoid:
        """End the round in flight as void: its work stays in the local parameters.

        Args:
            view_changed: whether it is void because the members have changed.
            is_behind: the state lacks earlier rounds and is being fetched, so this round does not count in it.
        """
        self.void += 1
        contribution = self._land()
        if not is_behind:
            self.state.count_void(contribution.round.outer_step)
        return RoundVoid(
            step=step,
            replica=contribution.replica,
            **contribution.round._asdict(),
            reason=reason,
            view_changed=view_changed,
        )

    def _land(self) -> Contribution:
        """End the round in flight and return what this replica gave to it."""
        assert self.flight is not None, "a round is in flight"
        contribution, self.flight, self.candidate = self.flight.contribution, None, None
        return contribution

    def adopt(self, state: Mapping[str, Any], finished_rounds: int, averages: Sequence[Average] = ()) -> None:
        """Load a received state, see `GlobalState.load`. The work in no mean yet stays in the local parameters."""
        before = self.global_params.clone()
        self.state.load(state, finished_rounds, averages)
        self._carry_over(before)

    def reset_local(self, rule: MergeRule, sent: Tensor | None = None) -> None:
        """Merge the global parameters into the local ones by ``rule`` (Algorithm 2, line 12)."""
        others = [self.global_params] if sent is None else [self.global_params, sent]
        with self._copies.moving(self.parameters):
            for local, values, *kept in self._local_parts(*others):
                rule.merge(local, values, kept[0] if kept else None)

    def _local_buffers(self) -> dict[str, Any]:
        return buffers_of(collect_buffers(self._model, self._at_home)) if self.carries_buffers else {}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return name -> agreed value of each buffer that the fragment carries, in its shape and dtype, on the CPU."""
        held = self.state.buffers
        if not self.carries_buffers:
            return {}
        return named_buffers(self._model, held.get("buffers"), held.get("integers"), self._at_home)

    def reset_buffers(self) -> None:
        """Set the model's buffers to the agreed ones, if this fragment carries them."""
        if self.carries_buffers:
            held = self.state.buffers
            restore_buffers_(self._model, held.get("buffers"), held.get("integers"), self._at_home)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the fragment except its local parameters, as nested state. Copies no tensors."""
        self.settle()
        flight, in_flight = self.flight, None
        if flight is not None:
            saved = {name: getattr(flight.contribution, name) for name in _SAVED_FIELDS}
            in_flight = {"outer_step": flight.contribution.round.outer_step, **saved, "sent": flight.sent}
        return {
            **self.state.tensors(),
            **{name: getattr(self, name) for name in ("residual", "candidate", *_COUNTERS)},
            "in_flight": in_flight,
        }

    def loader(self, state: Mapping[str, Any], last: int) -> Callable[[Transport], None]:
        """Check a state that `state_dict` returned, and return the function that restores it.

        ``last`` is the round that was sent last by then, or -1. That function submits the round that was in flight to a
        transport again. A state of another fragment is a `FragmentError`; what one lacks raises `UNREADABLE`.
        """
        self.state.check(state)
        flight, finished = state["in_flight"], int(state["finished_rounds"])
        counters = {name: kind(state[name]) for name, kind in _COUNTERS.items()}
        if flight is not None and flight["outer_step"] != last:
            raise FragmentError(f"Round {flight['outer_step']} of fragment {self.index} can't be in flight then.")
        contribution: Contribution | None = None
        candidate = sent = None
        if flight is not None:
            fields = {name: flight[name] for name in _SAVED_FIELDS}
            contribution = replace(self._template, **fields, round=RoundId(self.index, last))
            contribution.codec.validate(contribution.payload, self.numel)
            candidate, sent = state["candidate"], flight["sent"]
        for name, values, needed in (
            ("residual", state["residual"], self.residual is not None),
            ("candidate", candidate, candidate is not None),
            ("sent", sent, contribution is not None and self._merge.keeps_sent),
        ):
            kind = None if values is None else (values.dtype, tuple(values.shape))
            if kind != ((torch.float32, (self.numel,)) if needed else None):
                raise FragmentError(f"The {name} of fragment {self.index} is {kind}, so the state is that of another.")

        def load(transport: Transport) -> None:
            self.state.load(state, finished)
            if self.residual is not None:
                self.residual.copy_(state["residual"])
            self.candidate = None if candidate is None else candidate.to(self.device, copy=True)
            vars(self).update(counters)
            if contribution is not None:
                payload = contribution.payload.to(self.device)
                again = replace(contribution, replica=transport.replica, payload=payload)
                kept = None if sent is None else sent.to(self.device)
                pending = asked(transport, Pending, "average", lambda: transport.average(again))
                self.flight = InFlight(again, pending, kept)

        return load

    def _carry_over(self, before: Tensor) -> None:
        """Shift the local parameters by the change of the global ones, so that the pseudo-gradient stays the same."""
        with self._copies.moving(self.parameters):
            for local, old, new in self._local_parts(before, self.global_params):
                local.add_(new - old)

    def _local_parts(self, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield pieces of the local parameters, to be changed in place, with the same pieces of other vectors.

        Only parameters that are not contiguous float32 on the device of the global ones are copied, and copied back.
        """
        reshard(self._model)
        shards = [local_shard(parameter) for parameter in self.parameters]
        in_place = all(
            shard.dtype == torch.float32 and shard.device == self.device and shard.is_contiguous() for shard in shards
        )
        flat = [shard.view(-1) for shard in shards] if in_place else [self.local()]
        sizes = [values.numel() for values in flat]
        for parts in zip(flat, *(torch.split(other, sizes) for other in others), strict=True):
            yield from in_pieces(*parts)
        if not in_place:
            unflatten_(flat[0], self.parameters)

    def _not_finite(self, delta: Tensor) -> NonFiniteError:
        named = self.layout.named(delta)
        bad = [name for name, values in named.items() if not math.isfinite(largest_magnitude(values))]
        return NonFiniteError(
            f"The pseudo-gradient of fragment {self.index} is not finite; the local values of "
            f"{', '.join(bad) or 'no parameter of this rank'} contain NaN or infinity. Nothing was sent. Resume from "
            "the last checkpoint or restart, with a lower inner learning rate, gradient clipping or a wider precision."
        )

    def _empty(self) -> Tensor:
        if self.device.type == "cpu" and self.parameters[0].is_cuda:
            return torch.empty(self.numel, dtype=torch.float32, device="cpu", pin_memory=True)
        return empty(self.numel, torch.float32, self.device)
