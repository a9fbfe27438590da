"""The transport between replicas in one cluster, over process groups of torch.distributed (NCCL, gloo).

Payloads are uint8 collectives on their own device: an all-gather, or an all-to-all and an all-gather of means where
`plan_exchange` says so. Every rank sums in replica order; then all ranks compare digests, and a round whose digests
differ is void for all. On the CPU a thread does all of this while the replica trains. On CUDA the training thread
queues the collectives, which run on streams of their own, because NCCL needs them in the same order on every rank.

Membership is fixed. A `RollCall` finds out which rank is lost, and then every rank ends.
"""

from __future__ import annotations

import itertools
import json
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.algorithm import (
    Contribution,
    Exchange,
    Mean,
    RoundId,
    encode_mean,
    plan_round,
    weighted_mean,
)
from diloco.errors import (
    ConfigurationError,
    DivergedError,
    ReplicaLostError,
    RoundTimeoutError,
    RoundVoidError,
    TransportError,
)
from diloco.events import Site
from diloco.membership import View
from diloco.protocol import Average, Header, Rules, decode, encode, header_of, judge_headers
from diloco.transport.base import Pending, SnapshotSource, Transport
from diloco.transport.replica_group import ReplicaGroup
from diloco.transport.roll_call import RollCall
from diloco.transport.state_wire import Offer, describe
from diloco.units import diff
from diloco.waiting import at_once, in_thread

_HEAD_BYTES, _VOTE_BYTES = 2048, 1024  # a header and a vote, padded
_MOST_REASON = 200  # characters of the reason for which a contribution is withdrawn
_POLL_S = 0.2

_Gathering = Callable[[], Tensor]  # waits for what is gathered from all ranks of a group, a row of each


def _padded(data: bytes, size: int) -> Tensor:
    """Return ``data``, as far as it fits, as ``(size,)`` uint8 that begins with its length."""
    data = data[: size - 4]
    return torch.frombuffer(bytearray((len(data).to_bytes(4) + data).ljust(size, b"\0")), dtype=torch.uint8)


def _content(row: Tensor) -> bytes:
    data = row.numpy().tobytes()
    return data[4 : 4 + int.from_bytes(data[:4])]


class ProcessGroupTransport(Transport):
    """The transport of one rank of a replica: it exchanges its part of the model with the same ranks of the others.

    Args:
        peers: the ranks at this rank's position, one of each replica, in the order of replicas. It must support CPU
            tensors and those of the payload's device.
        everyone: all ranks that communicate; it must support CPU tensors.
        ranks: the rank in ``everyone`` of position s of replica m, at index m S + s.
        roll: who of them is alive.
        roll_ranks: likewise the rank in ``roll``.
        timeout_s: a round that takes longer ends the run.
    """

    def __init__(
        self,
        peers: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        ranks: Sequence[int],
        roll: RollCall,
        roll_ranks: Sequence[int],
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._peers, self._everyone = ReplicaGroup(peers), ReplicaGroup(everyone)
        self.replica = self._peers.position
        self.view = View.of(self._peers.size)
        self.timeout_s = timeout_s
        self.roll = roll
        self._messages, self._ranks, self._roll_ranks = everyone, ranks, roll_ranks
        self.ranks_per_replica = len(ranks) // self._peers.size
        self._rules = Rules(rank=ranks.index(self._everyone.position), ranks_per_replica=self.ranks_per_replica)
        self._source: SnapshotSource | None = None
        self._in_flight: set[RoundId] = set()
        self._agreements = itertools.count()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # why a collective has failed: gloo ends a process in which another one meets what is left of it
        self._broken: Exception | None = None
        in_thread(self._work, "diloco-process-group")
        in_thread(self._serve, "diloco-answer")

    # Rounds.

    def average(self, contribution: Contribution) -> Pending:
        round_id = contribution.round
        self.check(contribution, again=round_id in self._in_flight)
        self.roll.check()
        self._in_flight.add(round_id)
        plan = plan_round(contribution, len(self.view.members))
        if contribution.payload.is_cuda:
            return Pending(partial(self._take, round_id, plan, [self._begin(contribution, plan)]))
        outcome: Future[Average] = Future()
        self._jobs.put(partial(self._run, outcome, contribution, plan))
        return Pending(partial(self._take, round_id, plan, [partial(self._await, round_id, outcome)]))

    def _begin(self, mine: Contribution, plan: Exchange) -> Callable[[], Average]:
        """Queue the collectives of a round, and return the function that waits for them and decides the round."""
        mine = replace(mine, withdrawn=mine.checked().withdrawn[:_MOST_REASON])
        header = encode(header_of(mine))
        heads = self._everyone.begin_gather(_padded(header, _HEAD_BYTES))
        extras = [each.contiguous().view(torch.uint8) for each in (mine.buffers, mine.integers) if each is not None]
        more = self._peers.begin_gather(torch.cat(extras)) if extras else None
        if plan.pattern == "all-gather":
            payloads = self._peers.begin_gather(mine.payload)
        else:
            pieces = [mine.codec.cut(mine.payload, mine.numel, start, stop) for start, stop in plan.shards]
            sizes = [piece.numel() for piece in pieces]
            payloads = self._peers.begin_exchange(torch.cat(pieces), sizes, [sizes[self.replica]] * len(sizes))
        return partial(self._decide, mine, plan, heads, payloads, more)

    def _decide(
        self, mine: Contribution, plan: Exchange, heads: _Gathering, payloads: _Gathering, more: _Gathering | None
    ) -> Average:
        size, position = self.ranks_per_replica, self._rules.position
        received_heads = heads()
        headers = {index: decode(_content(received_heads[rank]), Header) for index, rank in enumerate(self._ranks)}
        for rank, header in headers.items():
            if header.round != mine.round:
                raise TransportError(f"Rank {rank} is in {header.round}, and this rank in {mine.round}.")
        verdict = judge_headers(headers, self.view.members, self._rules)
        received, extras = payloads(), None if more is None else more()
        rows = received.view(len(self.view.members), received.numel() // len(self.view.members))
        mean, reason, donor = None, verdict.reason, verdict.donor
        if not verdict.void:
            contributions = [
                self._received(mine, headers[member * size + position], member, rows, extras)
                for member in verdict.contributors
            ]
            mean, reason = self._mean(mine, plan, contributions)
        vote = f"{mean.digest() if mean is not None and not reason else ''}\n{reason}"
        ballots = self._everyone.gather(_padded(vote.encode(errors="replace"), _VOTE_BYTES))
        votes = [_content(ballots[rank]).decode(errors="ignore").split("\n", 1) for rank in self._ranks]
        reason = next((reason for _, reason in votes if reason), "")
        if not reason and any(len({digest for digest, _ in votes[here::size]}) > 1 for here in range(size)):
            reason = "the ranks have computed different means"
        if self.replica in verdict.diverged:
            raise verdict.divergence(mine.round, headers[donor * size + position].digest)
        if mean is None or reason:
            raise RoundVoidError(reason, round=str(mine.round))
        said = {"round": mine.round, "note": verdict.reason}
        return Average.of(plan, self.replica, view=self.view, **vars(mean), **said)

    def _received(
        self, mine: Contribution, header: Header, member: int, payloads: Tensor, extras: Tensor | None
    ) -> Contribution:
        buffers = integers = None
        if extras is not None:
            split = 4 * (header.buffers or 0)
            buffers = None if mine.buffers is None else extras[member, :split].clone().view(torch.float32)
            integers = None if mine.integers is None else extras[member, split:].clone()
        return replace(
            mine,
            replica=member,
            payload=payloads[member],
            weight=header.weight,
            base_weight=header.base_weight,
            buffers=buffers,
            integers=integers,
        )

    def _mean(
        self, mine: Contribution, plan: Exchange, contributions: Sequence[Contribution]
    ) -> tuple[Mean | None, str]:
        """Return the mean, and why this rank finds the round void; "" if it does not."""
        scattered = plan.pattern == "reduce-scatter"
        start, stop = plan.shards[self.replica] if scattered else (0, mine.numel)
        mean, reason = None, ""
        try:
            mean = weighted_mean([replace(contribution, numel=stop - start) for contribution in contributions])
        except Exception as error:  # of any kind: the other ranks wait for this rank's vote
            reason = (str(error) or type(error).__name__).splitlines()[0]
        if not scattered:
            return mean, reason
        sizes = [plan.mean.payload_bytes(b - a) for a, b in plan.shards]
        own = mine.payload.new_zeros(max(sizes))
        if mean is not None:
            own[: sizes[self.replica]] = encode_mean(mean.values, plan.mean)
        rows = self._peers.gather(own)  # also if this rank has none, for which the others wait
        if mean is None:
            return None, reason
        values = torch.empty(mine.numel, dtype=torch.float32, device=rows.device)
        for (a, b), size, row in zip(plan.shards, sizes, rows, strict=True):
            plan.mean.decode(row[:size], b - a, out=values[a:b])
        return replace(mean, values=values), ""

    def tick(self) -> None:
        """Raise `ReplicaLostError` if the ranks can't continue, as the next round may be many steps away."""
        self.roll.check()

    def _take(self, round_id: RoundId, plan: Exchange, outcome: list[Callable[[], Average]]) -> Average:
        """Return the average that ``outcome`` waits for, and count its bytes, as a round in flight is sent again."""
        started_s = time.monotonic()
        try:
            average = outcome.pop()()
        except (RuntimeError, ReplicaLostError) as error:
            raise self.roll.explained(error) from error
        finally:
            self._in_flight.discard(round_id)
            here = self.view.members.index(self.replica)
            self.sent_bytes += plan.sent[here]
            self.received_bytes += plan.received[here]
        return replace(average, wait_s=time.monotonic() - started_s)

    def _await(self, round_id: RoundId, outcome: Future[Average]) -> Average:
        until_s = time.monotonic() + self.timeout_s
        try:
            while wait([outcome], _POLL_S).not_done:
                self.roll.check_round()
                if time.monotonic() > until_s:
                    words = f"{round_id} was not decided within {self.timeout_s:g} s."
                    raise RoundTimeoutError(words, round=str(round_id))
            return outcome.result()
        finally:
            del outcome  # an error in it refers to this frame, which keeps the caller's round alive

    def _run(self, outcome: Future[Average], contribution: Contribution, plan: Exchange) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            outcome.set_result(self._begin(contribution, plan)())
        except Exception as error:
            if not isinstance(error, RoundVoidError | DivergedError):
                self._broken = error
            outcome.set_exception(error.with_traceback(None))  # which would keep the round's tensors

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the round

    # State.

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        self._source = source

    def fetch(
        self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None
    ) -> Future[Mapping[str, Any]]:
        return at_once(self._fetch, fragment, donors, expected_bytes)

    def _fetch(self, fragment: int, donors: Sequence[int], expected_bytes: int | None) -> Mapping[str, Any]:
        donor = next((each for each in donors if each in self.view.members and each != self.replica), None)
        if donor is None:
            raise TransportError(f"None of the donors {list(donors)} is another member of {self.view}.")
        index = donor * self.ranks_per_replica + self._rules.position
        rank = self._ranks[index]
        self.roll.ask(self._roll_ranks[index], [fragment, expected_bytes])
        head = _content(self._receive(_padded(b"", _VOTE_BYTES), rank)).decode(errors="ignore")
        size, _, refusal = head.partition("\n")
        if refusal:
            raise TransportError(f"replica {donor} was asked for fragment {fragment}, but {refusal}.", replicas=[donor])
        outline = self._receive(torch.empty(int(size), dtype=torch.uint8, device="cpu"), rank)
        offer: Offer = decode(outline.numpy().tobytes(), Offer)
        offer.check(expected_bytes)
        state, values = offer.allocate()
        for part in values.parts:
            self._receive(torch.frombuffer(part, dtype=torch.uint8), rank)
        self.fetched_bytes += values.size_bytes
        return state

    def _receive(self, data: Tensor, rank: int) -> Tensor:
        received = in_thread(self._messages.recv([data], rank, 0).wait, "diloco-fetch")
        self.roll.wait(received.done)
        received.result()
        return data

    def _serve(self) -> None:
        while (asked := self.roll.questions.get()) is not None:
            rank, (fragment, expected_bytes) = asked
            with suppress(RuntimeError):  # the rank has ended, which the roll call finds out
                self._send_state(rank, fragment, expected_bytes)

    def _send_state(self, rank: int, fragment: int, expected_bytes: int | None) -> None:
        """Send a fragment's state to a rank that has asked for it."""
        parts, refusal = list[Any](), ""
        try:
            if self._source is None:
                raise TransportError("it has published nothing")
            offer, values = describe(self._source(fragment))
            offer.check(expected_bytes)
            parts = [bytearray(encode(offer)), *values.parts]
        except Exception as error:  # of any kind: the other rank waits for an answer
            refusal = str(error) if isinstance(error, TransportError) else f"it can't copy its state: {error}"
        head = f"{len(parts[0]) if parts else 0}\n{refusal}".encode(errors="replace")
        for data in [_padded(head, _VOTE_BYTES), *(torch.frombuffer(part, dtype=torch.uint8) for part in parts)]:
            self._messages.send([data], self._ranks[self._roll_ranks.index(rank)], 0).wait()

    # Members.

    def ranks(self) -> Collection[int]:
        size, first = self.ranks_per_replica, self.replica * self.ranks_per_replica
        return self._roll_ranks[first : first + size]

    def agree(self, facts: Mapping[str, str]) -> None:
        name, size = f"arguments ({next(self._agreements)})", self.ranks_per_replica
        texts = self.roll.meet(name, json.dumps(dict(facts)), self.timeout_s, self._roll_ranks)
        every = [json.loads(text) for text in texts]
        for rank in range(size, len(every)):
            if reason := diff(every[rank % size], every[rank], "replica 0", f"replica {rank // size}"):
                raise ConfigurationError(f"{reason}. All replicas need the same.")

    def announce_site(self, site: Site) -> None:
        self.roll.tell(site)

    def sites(self) -> Mapping[int, Site]:
        told = self.roll.told()
        firsts = enumerate(self._roll_ranks[:: self.ranks_per_replica] if told else [])
        return {replica: Site(*told[rank]) for replica, rank in firsts if told[rank] is not None}

    def close(self, failed: str = "") -> None:
        """End the threads; the other ranks end too, unless all have finished."""
        self.roll.close(failed)
        self._jobs.put(None)
