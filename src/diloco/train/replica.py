"""One replica of a run: its random numbers, and the averaging of its gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.algorithm import (
    LEAST_GRADIENTS,
    Codec,
    Contribution,
    RoundId,
    collect_buffers,
    contribution_weight,
    flatten,
    largest_magnitude,
    local_shard,
    persistent_buffers,
    restore_buffers_,
    trainable_parameters,
    unflatten_,
)
from diloco.data import Batches
from diloco.errors import RoundVoidError, TransportError, ViewChangedError
from diloco.events import Event, Note
from diloco.model import LanguageModel
from diloco.outer import DiLoCo
from diloco.train.inner import InnerLoop
from diloco.transport import Pending, ReplicaGroup, Transport

_ATTEMPTS = -LEAST_GRADIENTS
"""Rounds to try for the gradients of one step. No later round contains them, unlike a pseudo-gradient's work."""


class RandomState:
    """The random numbers of one replica: torch's generators of the CPU and, once CUDA is initialised, of its GPU.

    A model draws (dropout, for example) from generators that belong to the process. A replica installs its own while it
    works, so a run gives the same bits whether or not its replicas share a process.
    """

    def __init__(self, seed: int, replica: int) -> None:
        sequence = np.random.SeedSequence(seed, spawn_key=(replica,))
        self._seeds = [int(child.generate_state(1, np.uint64)[0]) for child in sequence.spawn(4)[2:]]
        self._states = [torch.Generator("cpu").manual_seed(self._seeds[0]).get_state()]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from these generators inside the block; afterwards the process has its own again."""
        before = [generator.get_state() for generator in _generators()]
        self._install(self._states)
        try:
            yield
        finally:
            self._states = [generator.get_state() for generator in _generators()]
            self._install(before)

    def _install(self, states: Sequence[Tensor]) -> None:
        for number, generator in enumerate(_generators()):  # a state of a GPU has none on a machine without one
            if number < len(states):
                generator.set_state(states[number])
            else:  # CUDA has been initialised since
                generator.manual_seed(self._seeds[1])

    def state_dict(self) -> dict[str, Any]:
        return {"torch": [state.clone() for state in self._states]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._states = [saved.cpu().clone() for saved in state["torch"]]


def _generators() -> Sequence[torch.Generator]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return (torch.default_generator,)
    return torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]


def seed_process(seed: int, replica: int) -> None:
    """Seed the generators of Python and NumPy, which all replicas of this process share, by the first of them."""
    python, numpy_ = np.random.SeedSequence(seed, spawn_key=(replica,)).spawn(2)
    random.seed(int(python.generate_state(1, np.uint64)[0]))
    np.random.seed(numpy_.generate_state(4))


def process_random() -> dict[str, Any]:
    """Return the state of the generators of Python and NumPy, as JSON."""
    name, words, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [name, [int(word) for word in words], *rest]}


def load_process_random(state: Mapping[str, Any]) -> None:
    """Restore what `process_random` returned."""
    version, words, normal = state["python"]
    random.setstate((version, tuple(words), normal))
    name, numpy_words, *rest = state["numpy"]
    np.random.set_state((name, np.array(numpy_words, dtype=np.uint32), *rest))


class GradientAverager:
    """Replaces the gradients of one replica by their mean over all replicas, through the transport that DiLoCo uses.

    The model's buffers become those of all replicas too, so that these still have the same model after the step.
    ``group`` are the ranks of the replica, each of which averages the values that it holds; ``base_weight`` is the
    weight of a step of which all targets count.
    """

    def __init__(
        self, model: LanguageModel, transport: Transport, codec: Codec, group: ReplicaGroup, base_weight: float = 1.0
    ) -> None:
        self.model = model
        self.base_weight = base_weight
        self.parameters = list(trainable_parameters(model).values())
        self.transport = transport
        self.codec = codec
        self.group = group
        self._sent: tuple[Contribution, Pending]

    def begin(self, step: int, weight: float = 1.0) -> None:
        """Send the gradients of inner step ``step`` (counted from 0), which have this weight in the mean.

        A missing gradient counts as zero, and a weight of 0 says that no target of the batch counts.
        """
        numel = sum(local_shard(parameter).numel() for parameter in self.parameters)
        values = torch.empty(numel, dtype=torch.float32, device=self.parameters[0].device)
        flatten(self._gradients(), values)
        # checked before encoding, as a saturating codec would hide it; the ranks of a replica withdraw together
        finite = self.group.all(math.isfinite(largest_magnitude(values)))
        for parameter in self.parameters:
            parameter.grad = None  # until `finish`, the payload has them
        buffers, integers = collect_buffers(self.model)
        self._send(
            Contribution(
                round=RoundId(-1, step),
                replica=self.transport.replica,
                codec=self.codec,
                numel=numel,
                payload=self.codec.encode(values),
                weight=contribution_weight(self.base_weight, weight, 1),
                base_weight=self.base_weight,
                withdrawn="" if finite else "gradients that are not finite",
                buffers=buffers,
                integers=integers,
            )
        )
        self.transport.tick()

    def begin_again(self) -> None:
        """Send the same gradients in another round, after the last one was void on all replicas."""
        contribution, _ = self._sent
        void = contribution.round
        self._send(replace(contribution, round=void._replace(fragment=void.fragment - 1)))

    def finish(self) -> RoundVoidError | None:
        """Replace the gradients by the mean, in the next view if the current one ends; return a void round's error."""
        while True:
            contribution, pending = self._sent
            try:
                average = pending.wait()
                unflatten_(average.values, self._gradients())
                if (average.buffers, average.integers) != (None, None):
                    restore_buffers_(self.model, average.buffers, average.integers)
                del self._sent  # it is as large as the model
                return None
            except ViewChangedError:
                self._send(contribution)
            except RoundVoidError as error:
                return error
            except TransportError:  # which ends a shared start, after which no others take their place
                del self._sent
                raise

    def _send(self, contribution: Contribution) -> None:
        self._sent = contribution, self.transport.average(contribution)

    def _gradients(self) -> list[Tensor]:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def average_gradients(
    averagers: Sequence[GradientAverager], emit: Callable[[Event], None], *, may_skip: bool, may_lose: bool = False
) -> bool:
    """Replace the gradients of the replicas of this process, which `begin` has sent, by the mean.

    A void round is tried again with the same gradients, with a note for each whose step the caller sets, unless it
    ``may_skip`` the step (gradient scaling). The last `RoundVoidError` names the reason and the replicas that failed.

    Returns:
        False if the step must be skipped: the round is void on all replicas, or ``may_lose`` and the others are lost.
    """
    void: list[RoundVoidError] = []
    try:
        for left in reversed(range(_ATTEMPTS)):
            void = [error for averager in averagers if (error := averager.finish())]
            if may_skip or not void:
                break
            if not left:
                raise void[0]
            emit(Note(step=0, text=f"{void[0]} The round is tried again."))
            for averager in averagers:
                averager.begin_again()
    except TransportError as error:
        if isinstance(error, RoundVoidError) or not may_lose:
            raise
        return False
    # ranks that hold shards have rounds of their own, and skip the step together
    return not (may_skip and any(averager.group.any(bool(void)) for averager in averagers))


class SharedStart:
    """What replicas of one process have in common while they average gradients: a model and an optimizer.

    They have equal weights then, so one inner loop serves all of them, unless batches or a loss scale leave something
    of their own in it.

    Args:
        make: returns a new inner loop, with given parameters by name.
        initial: the parameters with which it begins; None: new ones.
    """

    def __init__(
        self, make: Callable[[Mapping[str, Tensor] | None], InnerLoop], initial: Mapping[str, Tensor] | None
    ) -> None:
        self.inner = make(initial)
        self._make = make
        self._is_taken = False

    @property
    def serves_all(self) -> bool:
        """Whether one inner loop can serve several replicas."""
        return not persistent_buffers(self.inner.model) and not self.inner.scaler.is_enabled()

    def leave(self) -> InnerLoop:
        """Return the inner loop with which a replica goes on: the first takes this one, each other one a copy."""
        if not self._is_taken:
            self._is_taken = True
            return self.inner
        own = self._make(trainable_parameters(self.inner.model))
        own.load_state_dict(self.inner.state_dict())
        return own


@dataclass(eq=False)
class Replica:
    """The inner loop, data and outer loop of one replica."""

    number: int
    inner: InnerLoop
    shared: SharedStart | None  # what the inner loop belongs to until the outer loop begins
    sampler: Batches
    random_state: RandomState
    gradients: GradientAverager
    diloco: DiLoCo | None = None

    @property
    def model(self) -> LanguageModel:
        """The model that it trains."""
        return self.inner.model
