"""Averaging of gradients at every step, for the data-parallel baseline and the shared start of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diloco.algorithm import (
    Codec,
    Contribution,
    RoundId,
    contribution_weight,
    flatten,
    largest_magnitude,
    local_shard,
    trainable_parameters,
    unflatten_,
)
from diloco.errors import RoundVoidError, TransportError, ViewChangedError
from diloco.events import Event, Note
from diloco.membership import LEAST_FRAGMENT
from diloco.model import LanguageModel
from diloco.transport import Pending, ReplicaGroup, Transport

__all__ = ["GradientAverager", "average_gradients"]

_ATTEMPTS = -LEAST_FRAGMENT
"""Rounds to try for the gradients of one step. No later round contains them, unlike a pseudo-gradient's work."""


class GradientAverager:
    """Replaces the gradients of one replica by their mean over all replicas, through the transport that DiLoCo uses.

    ``group`` are the ranks of the replica, each of which averages the values that it holds.
    """

    def __init__(self, model: LanguageModel, transport: Transport, codec: Codec, group: ReplicaGroup) -> None:
        self.parameters = list(trainable_parameters(model).values())
        self.transport = transport
        self.codec = codec
        self.group = group
        self._sent: tuple[Contribution, Pending] | None = None

    def begin(self, step: int, weight: float = 1.0) -> None:
        """Send the gradients of inner step ``step`` (counted from 0). A missing gradient counts as zero.

        Args:
            weight: the weight of these gradients in the mean. 0: no token of the batch has a target that counts.
        """
        numel = sum(local_shard(parameter).numel() for parameter in self.parameters)
        values = torch.empty(numel, dtype=torch.float32, device=self.parameters[0].device)
        flatten(self._gradients(), values)
        # checked before encoding, as a saturating codec would hide it; the ranks of a replica withdraw together
        finite = self.group.all(math.isfinite(largest_magnitude(values)))
        self._send(
            Contribution(
                round=RoundId(-1, step),
                replica=self.transport.replica,
                codec=self.codec,
                numel=numel,
                payload=self.codec.encode(values),
                weight=contribution_weight(1.0, weight, 1),
                withdrawn="" if finite else "gradients that are not finite",
            )
        )
        self.transport.tick()

    def begin_again(self) -> None:
        """Send the same gradients in another round, after the last one was void on all replicas."""
        assert self._sent is not None, "begin comes first"
        contribution, _ = self._sent
        void = contribution.round
        self._send(replace(contribution, round=replace(void, fragment=void.fragment - 1)))

    def finish(self) -> RoundVoidError | None:
        """Replace the gradients by the mean, in the next view if the current one ends.

        Returns:
            The error of a round that is void on all replicas, after which `begin_again` may be called; None if the
            round was committed.

        Raises:
            TransportError: if the other replicas are lost.
        """
        while True:
            assert self._sent is not None, "begin comes first"
            contribution, pending = self._sent
            try:
                unflatten_(pending.wait().values, self._gradients())
                return None
            except ViewChangedError:
                self._send(contribution)
            except RoundVoidError as error:
                return error

    def forget(self) -> None:
        """Release the contribution and the average, each as large as the model."""
        self._sent = None

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
    """Replace the gradients of each averager, whose `begin` was called, by the mean.

    A void round is tried again with the same gradients, so that a slow or broken link costs nothing but time; ``emit``
    receives a note for each, whose step the caller sets.

    Args:
        averagers: those of the replicas of this process.
        may_skip: whether a void round skips the step (gradient scaling) instead of being tried again.
        may_lose: whether losing the other replicas skips the step instead of raising.

    Returns:
        False if the step must be skipped: the round is void on all replicas, or the other replicas are lost.

    Raises:
        RoundVoidError: if the round of every attempt is void. It names the reason and the replicas whose gradients
            failed.
        TransportError: if the other replicas are lost and ``may_lose`` is false.
    """
    tried = 1
    try:
        while void := [error for averager in averagers if (error := averager.finish())]:
            if may_skip:
                break
            if tried == _ATTEMPTS:
                raise RoundVoidError(
                    f"{void[0]} It was tried {tried} times, and data-parallel training can't continue without it. "
                    "Nothing was applied. Fix the cause and resume from the last checkpoint with --resume.",
                    round=void[0].round,
                    replicas=void[0].replicas,
                )
            tried += 1
            emit(Note(step=0, text=f"{void[0]} The round is tried again."))
            for averager in averagers:
                averager.begin_again()
    except TransportError as error:
        if isinstance(error, RoundVoidError) or not may_lose:
            raise
        return False
    finally:
        for averager in averagers:
            averager.forget()
    # ranks that hold shards have rounds of their own, and skip the step together
    return not (may_skip and any(averager.group.any(bool(void)) for averager in averagers))
