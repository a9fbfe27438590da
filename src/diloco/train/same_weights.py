"""Replicas in several processes begin with the same bits, also on processors of several kinds.

`torch.randn` and optimizers round otherwise under other vector instructions, and a model of the user's own may draw
from generators that differ by process. So the replicas compare digests of their weights and buffers before the first
step and after a shared start. If any differs, all take those of the replica with the least number.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from diloco.algorithm import (
    LEAST_WEIGHT,
    WEIGHTS,
    WEIGHTS_DIGEST,
    Contribution,
    RoundId,
    collect_buffers,
    digest_tensors,
    flatten,
    local_shard,
    make_codec,
    persistent_buffers,
    restore_buffers_,
    trainable_parameters,
    unflatten_,
)
from diloco.errors import ViewChangedError
from diloco.model import LanguageModel
from diloco.outer import Copies
from diloco.protocol import Average
from diloco.transport import ReplicaGroup, Transport

_CODEC = make_codec("float32")


def agree_on_weights(
    model: LanguageModel,
    optimizer: Any,
    transport: Transport,
    group: ReplicaGroup,
    step: int,
    at_home: Collection[str] = (),
) -> str:
    """Give the model the weights and buffers of the first replica, unless all have the same.

    All replicas call it after inner step ``step``. ``group`` are the ranks of this one, each of which exchanges the
    values that it holds. Parameters and buffers ``at_home`` are left out.

    Returns:
        A sentence on what was changed, or "" if all have the same.

    Raises:
        TransportError: if a round is void or a replica is lost. Nothing was changed.
    """
    tensors = {**trainable_parameters(model), **persistent_buffers(model)}
    shards = {name: local_shard(tensor) for name, tensor in tensors.items() if name not in at_home}
    digest = bytes.fromhex(digest_tensors(shards))
    mine = torch.tensor([*digest], dtype=torch.uint8, device="cpu")
    moved = transport.sent_bytes, transport.received_bytes  # those of payloads, and these few bytes are none
    values = mine.float().to(next(iter(shards.values())).device)
    average = _averaged(transport, RoundId(WEIGHTS_DIGEST, step), values, integers=mine)
    transport.sent_bytes, transport.received_bytes = moved
    of_first, first = average.integers, average.contributors[0]
    assert of_first is not None, "they are the digest of the first"
    # the mean of all digests equals that of the first only if all are the same
    if group.all(torch.equal(average.values.cpu(), of_first.cpu().float())):
        return ""
    whose = "this replica" if group.any(not torch.equal(of_first.cpu(), mine)) else "another replica"
    _take_over(model, optimizer, transport, first, step, at_home)
    return (
        f"After step {step} the weights of {whose} differed from those of replica {first}, as another kind of "
        f"processor rounds otherwise. All replicas go on with those of replica {first}."
    )


def _take_over(
    model: LanguageModel, optimizer: Any, transport: Transport, first: int, step: int, at_home: Collection[str]
) -> None:
    parameters = [parameter for name, parameter in trainable_parameters(model).items() if name not in at_home]
    buffers, integers = collect_buffers(model, at_home)
    numel, device = sum(local_shard(parameter).numel() for parameter in parameters), local_shard(parameters[0]).device
    values = torch.zeros(numel, dtype=torch.float32, device=device)
    if mine := transport.replica == first:
        flatten(parameters, values)
    # the bytes of all buffers travel as integers, of which the average has those of the first
    parts = [part.cpu().view(torch.uint8) for part in (buffers, integers) if part is not None]
    given = {"integers": torch.cat(parts) if parts else None, "weight": 1.0 if mine else LEAST_WEIGHT}
    average = _averaged(transport, RoundId(WEIGHTS, step), values, **given)
    with torch.no_grad(), Copies([optimizer]).moving(parameters):
        unflatten_(average.values, parameters)
    if average.integers is not None:
        split = 0 if buffers is None else buffers.nbytes
        floats, rest = average.integers[:split].clone().view(torch.float32), average.integers[split:]
        restore_buffers_(model, None if buffers is None else floats, None if integers is None else rest, at_home)


def _averaged(transport: Transport, round_id: RoundId, values: Tensor, **more: Any) -> Average:
    while True:
        contribution = Contribution(
            round=round_id,
            replica=transport.replica,
            codec=_CODEC,
            numel=len(values),
            payload=_CODEC.encode(values),
            **more,
        )
        try:
            return transport.average(contribution).wait()
        except ViewChangedError:  # a replica of a swarm has come or gone
            continue
