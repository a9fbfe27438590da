"""The global state of a fragment, which all replicas agree on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import (
    Mean,
    OuterOptimizer,
    OuterState,
    digest_state,
    largest_magnitude,
    measured_outer_step,
)
from diloco.devices import beside_training, empty, to_device
from diloco.errors import FragmentError
from diloco.protocol import Average
from diloco.units import diff
from diloco.waiting import in_thread

_LARGE_BYTES = 1 << 19
"""From this size a thread hashes the state, beside the training: hashing 0.5 MiB takes as long as starting a thread,
about 60 us."""

Measures = Mapping[str, Any]  # of an outer step by name; see `measured_outer_step`

Direction = Callable[[Tensor], Tensor]
"""Returns what the outer optimizer gets for a mean pseudo-gradient, ``(numel,)`` float32, which it leaves unchanged."""


@dataclass(frozen=True, eq=False)
class _Prepared:
    """An outer step."""

    applied: Tensor  # the mean
    values: Tensor  # those after it
    outer: OuterState
    measures: Measures
    mean: Tensor | None  # a sample
    version: int = -1  # of the state that was copied, and the digest of the new one, if it was taken on copies
    digest: Future[str] | None = None


class GlobalState:
    """The global parameters of a fragment and their outer state, which all replicas agree on.

    Replicas of one process share it if they take turns in one thread: the first to merge a round takes its outer step.
    Any thread can copy it (`snapshot`) while the training thread changes it.
    """

    def __init__(
        self, values: Tensor, optimizer: OuterOptimizer, direction: Direction, buffers: Mapping[str, Tensor]
    ) -> None:
        self.values = values  # ``(numel,)`` float32, theta
        self.outer = optimizer.init(values)
        self.buffers = buffers  # those of the last average; see `buffers_of`
        self.finished_rounds = 0  # committed or void
        self.version = 0  # differs after every change
        self.users = 0  # replicas of this process that use it
        self._optimizer, self._direction = optimizer, direction
        self._lock = threading.Lock()
        self.reader: Future[Any] | None = None  # of a thread that still reads the values
        self._prepared: Future[_Prepared] | None = None  # the next outer step
        self._moved: Future[tuple[Tensor, Tensor]] | None = None  # the next mean, on the host and on the GPU
        self._digest: Future[str] | None = None  # of a large state, which a thread computes while the replica trains
        self._last_mean: Tensor | None = None  # a sample of the last mean
        # the last outer step: its number, its measures, and the values before it if a replica will need them
        self._last: tuple[int, Measures, Tensor | None] = (-1, {}, None)
        self._hash()

    @contextmanager
    def changing(self, digest: Future[str] | None = None) -> Iterator[None]:
        """Hold off snapshots while the state changes. ``digest`` is that of the new state, if a thread computes it."""
        for thread in (self.reader, self._prepared):  # the second one needs the lock
            if thread is not None:
                thread.exception()  # waits
        with self._lock:
            if self._digest is not None:
                self._digest.exception()
            self.version += 1
            try:
                yield
            finally:
                self._hash(digest)

    def digest(self) -> str:
        """Return the digest of the values and the outer state. That of a large state was computed in a thread."""
        return self._digest_now() if self._digest is None else self._digest.result()

    def take_step(self, average: Average, *, keep: bool = False) -> tuple[Measures, Tensor | None]:
        """Update ``global <- OuterOpt(global, mean)`` (Algorithm 2, line 11), once for all replicas that share it.

        Returns its measures, and with ``keep`` the values before, ``(numel,)`` float32.
        """
        outer_step = average.round.outer_step
        if self.users > 1 and self._last[0] == outer_step:
            return self._last[1:]
        prepared, self._prepared = self._prepared, None
        step = None if prepared is None else prepared.result()
        if step is not None and (step.applied is not average.values or step.version != self.version):
            step = None  # the state has changed since
        with self.changing(None if step is None else step.digest):
            before = self.values if keep else None
            if step is None:
                before = _copy(self.values) if keep else None  # the step changes them in place
                step = self._stepped(average, self.values, self.outer)
            self.values, self.outer, self._last_mean = step.values, step.outer, step.mean
            self.buffers = buffers_of(average) or self.buffers
            measures = step.measures
            self.finished_rounds = outer_step + 1
        self._last = outer_step, measures, before if self.users > 1 else None
        return measures, before

    def prepare(self, mean: Mean) -> None:
        """Begin the outer step that `take_step` will take of ``mean`` if its round is committed, on copies in a thread.

        On a GPU, where the step takes no time, the thread moves the mean there, through pinned memory, and makes it
        what the optimizer gets.
        """
        if self.values.is_cuda:
            self._moved = in_thread(lambda: self._move(mean.values), "mean", daemon=False)
            return
        self._prepared = in_thread(lambda: self._copied_step(mean), "outer-step", daemon=False)

    def _copied_step(self, mean: Mean) -> _Prepared:
        with self._lock:
            copies, version = self._copies(), self.version
        step, buffers = self._stepped(mean, *copies), buffers_of(mean) or self.buffers
        hashed = in_thread(lambda: digest_state(*copies, buffers), "digest", daemon=False)  # the merge needs it not yet
        return replace(step, version=version, digest=hashed)

    def _stepped(self, average: Mean, values: Tensor, outer: OuterState) -> _Prepared:
        """Take the outer step of ``average`` on ``values`` and ``outer``, in place."""
        mean = self.outer_mean(average.values)
        measures, sample = measured_outer_step(self._optimizer, mean, outer, values, self._last_mean)
        return _Prepared(average.values, values, outer, measures, sample)

    def _move(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        with beside_training(self.values.device):
            moved = self._direction(to_device(mean, self.values.device))
            torch.cuda.current_stream(moved.device).synchronize()
        return mean, moved

    def outer_mean(self, mean: Tensor) -> Tensor:
        """Return what the outer optimizer gets for a mean, on the device of the values."""
        if self._moved is not None:
            (source, moved), self._moved = self._moved.result(), None
            if source is mean:
                moved.record_stream(torch.cuda.current_stream(moved.device))  # its memory is of another stream
                return moved
        return self._direction(mean.to(self.values.device))

    def count_void(self, outer_step: int) -> None:
        """Count a round as finished that no replica applied."""
        self._prepared = None
        if self.finished_rounds <= outer_step:
            with self.changing():
                self.finished_rounds = outer_step + 1

    def tensors(self) -> dict[str, Any]:
        """Return the state as it is saved and sent, as nested state, without copying tensors."""
        return {
            "global_params": self.values,
            "outer_step": self.outer.step,
            "slots": dict(self.outer.slots),
            "buffers": dict(self.buffers),
            "finished_rounds": self.finished_rounds,
        }

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state."""
        # other threads may change the memory of a GPU on streams of their own, so it is waited for at both ends
        settle = torch.cuda.synchronize if self.values.device.type == "cuda" else lambda _: None
        with self._lock:
            settle(self.values.device)
            values, outer = self._copies()
            settle(self.values.device)
            return self.tensors() | {"global_params": values, "slots": outer.slots}

    def _copies(self) -> tuple[Tensor, OuterState]:
        slots = {name: _copy(values) for name, values in self.outer.slots.items()}
        return _copy(self.values), OuterState(self.outer.step, slots)

    def check(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
        """Return the tensors and the outer step of a state; raise `FragmentError` unless it is finite and fits."""
        mine, theirs = _named(self.values, self.outer.slots), _named(state["global_params"], state["slots"])
        buffers = state["buffers"]  # which may be infinite, as masks are
        pairs = (mine | {**self.buffers}, theirs | {**buffers})
        ours, others = ({name: f"{tuple(v.shape)} {v.dtype}" for name, v in each.items()} for each in pairs)
        if words := diff(others, ours, "the received state", "this fragment"):
            raise FragmentError(f"{words}. It must come from the same model, fragments and outer optimizer.")
        if odd := [name for name, values in theirs.items() if not math.isfinite(largest_magnitude(values))]:
            raise FragmentError(f"{', '.join(odd)} of the state has values that are NaN or infinite.")
        return theirs, int(state["outer_step"])

    def load(self, state: Mapping[str, Any], finished_rounds: int, averages: Sequence[Average] = ()) -> None:
        """Copy a state that fits into this one, and take the outer steps of the rounds that it lacks, ``averages``.

        Afterwards ``finished_rounds`` are finished.
        """
        theirs, outer_step = self.check(state)
        with self.changing():
            for name, values in _named(self.values, self.outer.slots).items():
                values.copy_(theirs[name])
            self.outer.step = outer_step
            self.buffers = {name: values.cpu().clone() for name, values in state["buffers"].items()}
            for average in averages:
                self._optimizer.update(self.outer_mean(average.values), self.outer, self.values)
                self.buffers = buffers_of(average) or self.buffers
            self.finished_rounds = finished_rounds
            self._last = (-1, {}, None)

    def digest_of(self, state: Mapping[str, Any]) -> str:
        """Return the digest of a received state that its holder would put into the header of a round."""
        slots = {name: state["slots"][name] for name in self.outer.slots}
        outer = OuterState(int(state["outer_step"]), slots)
        return digest_state(state["global_params"], outer, {name: state["buffers"][name] for name in self.buffers})

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.values, *self.outer.slots.values(), *self.buffers.values()))

    def _digest_now(self) -> str:
        return digest_state(self.values, self.outer, self.buffers)

    def _hash(self, digest: Future[str] | None = None) -> None:
        self._digest = digest
        if digest is not None:
            return
        if self.num_bytes() > _LARGE_BYTES:
            # on a GPU the outer step may still be queued on the training's stream
            queued = torch.cuda.current_stream(self.values.device).record_event() if self.values.is_cuda else None
            self._digest = in_thread(lambda: self._hashed(queued), "digest", daemon=False)

    def _hashed(self, queued: torch.cuda.Event | None) -> str:
        with beside_training(self.values.device):
            if queued:
                torch.cuda.current_stream(self.values.device).wait_event(queued)
            return self._digest_now()


def buffers_of(of: Mean | tuple[Tensor | None, Tensor | None]) -> dict[str, Tensor]:
    """Return the buffers of a model that are in a mean, or that `collect_buffers` returned, without those of None.

    ``buffers``: the floating-point ones, ``(n,)`` float32; ``integers``: the bytes of all others, ``(n,)`` uint8.
    """
    floats, integers = of if isinstance(of, tuple) else (of.buffers, of.integers)
    named = {"buffers": floats, "integers": integers}
    return {name: values for name, values in named.items() if values is not None}


def _copy(values: Tensor) -> Tensor:
    return empty(values.numel(), values.dtype, values.device).view_as(values).copy_(values)


def _named(values: Tensor, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"global_params": values, **slots}
