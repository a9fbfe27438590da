"""Averaging gradients at every step: the baseline, and the shared start of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from diloco.algorithm.averaging import Contribution, RoundId
from diloco.algorithm.codec import Codec
from diloco.algorithm.codec.base import largest_magnitude
from diloco.algorithm.fragments import flatten, local_shard, trainable_parameters, unflatten_
from diloco.algorithm.weighting import contribution_weight
from diloco.errors import RoundVoidError, TransportError, ViewChangedError
from diloco.events import Event, Note
from diloco.model.language_model import LanguageModel
from diloco.protocol.actions import Average
from diloco.protocol.fields import LEAST_FRAGMENT
from diloco.transport.base import Pending, Transport
from diloco.transport.replica_group import ReplicaGroup

__all__ = ["GradientAverager", "average_gradients"]

_ATTEMPTS = -LEAST_FRAGMENT
"""Rounds for the gradients of a step: they are in no later one, as the work of a pseudo-gradient is."""


class GradientAverager:
    """Replaces the gradients of one replica by the mean over all, through the same transport and the same mean.

    Args:
        codec: how gradients travel; float32 is plain data-parallel training.
        group: the replica's ranks, each of which averages what it holds; None: this one alone.
    """

    def __init__(
        self, model: LanguageModel, transport: Transport, codec: Codec, group: ReplicaGroup | None = None
    ) -> None:
        self.parameters = list(trainable_parameters(model).values())
        self.transport = transport
        self.codec = codec
        self.group = group or ReplicaGroup()
        self._pending: Pending | None = None
        self._contribution: Contribution | None = None

    def begin(self, step: int, weight: float = 1.0) -> None:
        """Send the gradients of inner step ``step`` (counted from 0); absent ones count as zero.

        Args:
            weight: of these gradients in the mean; 0: they are of a batch in which nothing counts.
        """
        self._fill_absent()
        numel = sum(local_shard(parameter).numel() for parameter in self.parameters)
        values = torch.empty(numel, dtype=torch.float32, device=self.parameters[0].device)
        flatten([parameter.grad for parameter in self.parameters if parameter.grad is not None], values)
        # looked at here, since a saturating codec would hide it; a replica's ranks withdraw together
        finite = self.group.all(math.isfinite(largest_magnitude(values)))
        self._contribution = Contribution(
            round=RoundId(-1, step),
            replica=self.transport.replica,
            codec=self.codec,
            numel=numel,
            payload=self.codec.encode(values),
            weight=contribution_weight(1.0, weight, 1),
            withdrawn="" if finite else "gradients that are not finite",
        )
        self._pending = self.transport.average(self._contribution)
        self.transport.tick()

    def begin_again(self) -> None:
        """The round is void on all replicas alike: send the same gradients in another one."""
        assert self._contribution is not None, "begin comes first"
        void = self._contribution.round
        self._contribution = replace(self._contribution, round=replace(void, fragment=void.fragment - 1))
        self._pending = self.transport.average(self._contribution)

    def finish(self) -> RoundVoidError | None:
        """Put the mean in the gradients' place.

        Returns:
            Why the round is void, on all replicas alike; `begin_again` may follow. None: it is not.

        Raises:
            TransportError: if the others are lost.
        """
        try:
            average = self._wait()
        except RoundVoidError as error:
            return error
        self._fill_absent()
        unflatten_(average.values, [parameter.grad for parameter in self.parameters if parameter.grad is not None])
        return None

    def forget(self) -> None:
        """Let go of what was sent, which is as large as the model."""
        self._pending = self._contribution = None

    def _fill_absent(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _wait(self) -> Average:
        """The mean, from the view that can give it: the next one, if the present one ends."""
        while True:
            assert self._pending is not None, "begin comes first"
            assert self._contribution is not None
            try:
                return self._pending.wait()
            except ViewChangedError:
                self._pending = self.transport.average(self._contribution)


def average_gradients(
    averagers: Sequence[GradientAverager], emit: Callable[[Event], None], *, may_skip: bool, may_lose: bool = False
) -> bool:
    """Put the mean in place of the gradients that each of them has begun to average.

    A void round is tried again with the same gradients, so that one slow or broken link costs time and nothing else.

    Args:
        averagers: of the replicas of this process.
        emit: gets a note of each round that is tried again, its step to be filled in.
        may_skip: whether a void round means to skip the step (gradient scaling), rather than to try again.
        may_lose: whether this replica looks for the others, where it has lost them, rather than end.

    Returns:
        False if the step is to be skipped: the round is void, on all replicas alike, or the others are lost.

    Raises:
        RoundVoidError: if round after round is void; it says why, and which replica's gradients failed.
        TransportError: if the others are lost and ``may_lose`` is false.
    """
    tried = 1
    try:
        while void := [error for averager in averagers if (error := averager.finish())]:
            if may_skip:
                return False
            if tried == _ATTEMPTS:
                raise RoundVoidError(
                    f"{void[0]} It was tried {tried} times, and data-parallel training can't go on without it. Nothing "
                    "was applied. Go on from the last checkpoint with --resume once its cause is mended.",
                    round=void[0].round,
                    replicas=void[0].replicas,
                )
            tried += 1
            emit(Note(step=0, text=f"{void[0]} It is tried again."))
            for averager in averagers:
                averager.begin_again()
    except RoundVoidError:
        raise
    except TransportError:
        if not may_lose:
            raise
        return False
    finally:
        for averager in averagers:
            averager.forget()
    return True
