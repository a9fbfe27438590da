"""The transport over process groups of torch.distributed: the contract, the bits of all transports, and losses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from diloco import connect_process_group
from diloco.algorithm import Float32, weighted_mean
from diloco.errors import ConfigurationError, RendezvousError, ReplicaLostError, TransportError
from diloco.transport import ProcessGroupTransport, ReplicaGroup, RollCall, Transport, fresh_store
from diloco.waiting import in_thread
from tests.outer.test_golden_digests import CASES, PARTS, Replica, train_in_parts
from tests.processes import Processes, receive, report
from tests.transport.contract import MakeEndpoints, TransportContract, check_void, contribution
from tests.transport.wires import at_once


class Groups:
    """Ranks connected by process groups of gloo, each with its own groups and threads, in one process."""

    def __init__(self) -> None:
        self.transports: list[ProcessGroupTransport] = []
        self._store, self._made = dist.HashStore(), 0

    def meet(self, num_replicas: int, *, silence_s: float = 6.0) -> Sequence[ProcessGroupTransport]:
        """Return the transports of so many replicas of one rank."""
        self._made += 1
        store = dist.PrefixStore(str(self._made), self._store)
        ranks = range(num_replicas)

        def one(rank: int) -> ProcessGroupTransport:
            group = dist.ProcessGroup(store, rank, num_replicas)
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, num_replicas, timedelta(seconds=60))
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            roll = RollCall(dist.PrefixStore("roll", store), rank, num_replicas, silence_s=silence_s)
            return ProcessGroupTransport(group, group, ranks, roll, ranks)

        made = at_once([lambda rank=rank: one(rank) for rank in ranks])
        for each in made:
            if isinstance(each, Exception):
                raise each
        self.transports += made
        return made

    def close(self) -> None:
        at_once([transport.close for transport in self.transports])


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


class TestProcessGroupContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self, groups: Groups) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return groups.meet(num_replicas)

        return make


@pytest.mark.parametrize("name", ["alpha merge", "eight replicas with encoded means"])
def test_digests_are_those_of_every_other_transport(name: str, groups: Groups) -> None:
    """With a stop, at which a fragment is in flight."""
    case = CASES[name]
    attempts = [groups.meet(case.num_replicas) for _ in PARTS[1]]

    def live(number: int) -> str:
        return train_in_parts(number, case, PARTS[1], [nullcontext(transports[number]) for transports in attempts])

    assert at_once([lambda m=m: live(m) for m in range(case.num_replicas)])[0] == case.digest


class Odd(Float32):
    """Decodes to other values, or to none."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def accumulate(self, payload: torch.Tensor, values: torch.Tensor, weight: float) -> None:
        if self.fails:
            raise ValueError("this rank can't add")
        super().accumulate(payload, values, weight + 1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_round_is_void_for_all_if_one_rank_has_another_mean_or_none(fails: bool, groups: Groups) -> None:
    given = [contribution(0), replace(contribution(1), codec=Odd(fails=fails))]
    check_void(groups.meet(2), given, "this rank can't add" if fails else "have computed different means")


def test_bytes_count_when_an_average_is_taken_as_a_round_in_flight_is_sent_again_after_a_stop(groups: Groups) -> None:
    first, second = groups.meet(2)
    rounds = [[each.average(contribution(each.replica, outer_step=k)) for each in (first, second)] for k in range(2)]
    for _, pending in rounds:
        pending.wait()  # when the second round is decided, the first one is on both
    assert first.sent_bytes == 0
    sent = [pending.wait().sent_bytes for pending, _ in rounds]
    assert first.sent_bytes == second.sent_bytes == sum(sent)


def test_a_rank_that_fails_says_why_and_all_end(groups: Groups) -> None:
    """The third one waits for no round, and learns of it before its next step."""
    first, second, third = groups.meet(3)
    pending = first.average(contribution(0))
    second.close("the disk is full")
    for end in (
        pending.wait,
        lambda: first.average(contribution(0, outer_step=1)),
        lambda: all(third.roll.stop_step(step) is None for step in itertools.count()),
        third.tick,
    ):
        with pytest.raises(ReplicaLostError, match="rank 1 has ended: the disk is full"):
            end()


def test_after_a_collective_has_failed_a_rank_begins_no_other(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one would meet what the others still send of the failed one, at which gloo ends the process."""
    first, _ = groups.meet(2, silence_s=0.3)
    begun: list[torch.Tensor] = []

    def gather(group: ReplicaGroup, value: torch.Tensor) -> None:
        begun.append(value)
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(ReplicaGroup, "begin_gather", gather)
    for pending in [first.average(contribution(0, outer_step=step)) for step in range(2)]:
        with pytest.raises(ReplicaLostError, match="Connection closed by peer"):
            pending.wait()
    assert len(begun) == 1


def test_a_round_that_the_others_will_never_take_part_in_ends(groups: Groups) -> None:
    first, second = groups.meet(2, silence_s=1.0)
    ending = in_thread(second.roll.finish, "ending")
    with pytest.raises(ReplicaLostError, match="Another replica has finished its run"):
        first.average(contribution(0)).wait()
    first.close("it has failed")
    with pytest.raises(ReplicaLostError, match="rank 0 has ended: it has failed"):
        ending.result()


def test_a_donor_that_can_not_copy_its_state_says_so(groups: Groups) -> None:
    def copy(fragment: int) -> Mapping[str, Any]:
        raise MemoryError("no room is left")

    donor, other = groups.meet(2)
    donor.publish(copy)
    with pytest.raises(TransportError, match="it can't copy its state: no room is left"):
        in_thread(lambda: other.fetch(0, [0]).result(), "fetch").result(20.0)


def test_all_stop_after_the_last_step_that_one_of_them_has_begun(groups: Groups) -> None:
    rolls = [each.roll for each in groups.meet(3)]

    def train(roll: RollCall) -> tuple[int, int]:
        """Take steps without end until the ranks agree where to stop; return that step, and the steps taken by then."""
        for step in itertools.count():
            if step == 100 * (roll.rank + 1) and roll.rank < 2:
                roll.ask_to_stop()
            if (last := roll.stop_step(step)) is not None:
                return last, step
        raise AssertionError("it has counted all numbers")

    agreed, taken = zip(*at_once([partial(train, roll) for roll in rolls]), strict=True)
    assert set(agreed) == {max(taken)}


def test_all_stop_even_if_one_of_them_has_begun_no_step(groups: Groups) -> None:
    first, second = (each.roll for each in groups.meet(2))
    assert first.stop_step(0) is None
    first.ask_to_stop()
    answers = map(first.stop_step, itertools.repeat(0))
    assert in_thread(lambda: next(last for last in answers if last is not None), "stopping").result(20.0) == 1
    assert second.stop_step(0) == 1


def test_ranks_that_start_again_meet_in_a_store_without_old_keys() -> None:
    """One of two fails before it has met the other, and both start again with the same store."""
    store = dist.HashStore()
    with pytest.raises(RendezvousError, match="rank 0 did not find all of the 2 ranks"):
        fresh_store(store, 0, 2, timeout_s=0.05)
    for attempt in range(2):
        fresh = at_once([lambda rank=rank: fresh_store(store, rank, 2, timeout_s=20.0) for rank in range(2)])
        assert not fresh[1].check(["attempt"])
        fresh[0].set("attempt", str(attempt))
        assert fresh[1].get("attempt") == str(attempt).encode()


def begin(rank: int, size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def test_without_torch_distributed_it_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="Start the program with torchrun and call init_process_group"):
        connect_process_group().__enter__()


LOSSY = CASES["int8 with error feedback"]


def rank_of_two(rank: int, folder: Path) -> str:
    """Train with a stop, as one of the two ranks of one of two replicas, and return the digest."""
    begin(rank, 4, folder)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    refused = pytest.raises(ConfigurationError, match=r"sharded over ranks 0, 1, 2, 3 of .* consists of ranks")
    with connect_process_group(mesh, silence_s=3.0) as transport, refused:
        Replica(transport.replica, transport, CASES["diloco"], sharded=True)
    with mock.patch(f"{Replica.__module__}.fully_shard", partial(fully_shard, mesh=mesh["shard"])):
        transports = (connect_process_group(mesh, silence_s=3.0) for _ in PARTS[1])
        digest = train_in_parts(rank // 2, LOSSY, PARTS[1], transports, sharded=True)
    with connect_process_group(mesh, ranks="whole", silence_s=3.0) as transport:  # the first rank of each talks
        average = transport.average(contribution(transport.replica, codec="fp4")).wait()
    pair = [contribution(replica, codec="fp4") for replica in range(2)]
    assert torch.equal(average.values, weighted_mean(pair).values)
    three, one = dist.new_group([0, 1, 2]), dist.new_group([3])
    for unfit in (one if rank == 3 else three, dist.init_device_mesh("cpu", (2, 2))):
        with pytest.raises(ConfigurationError, match=r"of the 4 ranks must be in one|none is called 'replica'"):
            connect_process_group(unfit).__enter__()
    dist.destroy_process_group()
    return digest


def test_the_digest_of_two_ranks_with_half_of_each_parameter(tmp_path: Path) -> None:
    """Of one case: the others differ by what every transport is given alike."""
    with Processes() as processes:
        processes.start(4, rank_of_two, tmp_path)
        assert processes.results(timeout_s=180)[0] == LOSSY.digest_of_shards


def loses_a_rank(rank: int, folder: Path, waits: str) -> str:
    """Take part in rounds of int8 until another rank is lost, and return the error."""
    begin(rank, 4, folder)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    try:
        with connect_process_group(mesh, silence_s=3.0) as transport:
            for outer_step in range(10_000):
                transport.average(contribution(transport.replica, outer_step=outer_step, codec="int8")).wait()
                if outer_step == 2:
                    report("begun")
                    if receive() == "wait" and waits == "elsewhere":
                        dist.barrier()
    except ReplicaLostError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_all_ranks_name_the_one_that_is_lost_and_end(how: str, tmp_path: Path) -> None:
    """They wait for a round; one that waits in a collective of its own stays there until the others have ended."""
    with Processes() as processes:
        processes.start(4, loses_a_rank, tmp_path, "elsewhere" if how == "frozen" else "")
        for rank in range(4):
            processes.next_report(rank, timeout_s=120)
        processes.kill(2) if how == "killed" else processes.freeze(2)
        started_s = time.monotonic()
        for rank in (0, 1, 3):
            processes.send(rank, "wait" if rank == 3 else "")
        others = (0, 1, 3) if how == "killed" else (0, 1)
        errors = processes.results(timeout_s=60, ranks=others)
        if how == "frozen":
            assert processes.exit_code(3) == 1
        taken_s = time.monotonic() - started_s
    assert {error.partition(":")[0] for error in errors.values()} == {"rank 2 (replica 1, position 0) is lost"}
    assert taken_s < 30.0, "1 s after a broken connection and 3 s without one, and load"
