"""The ranks of a replica communicate with each other, and one of them with other replicas, for all (invariant 10)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from diloco.algorithm import RoundId, weighted_mean
from diloco.errors import (
    CheckpointError,
    CodecError,
    ConfigurationError,
    DivergedError,
    RendezvousError,
    ReplicaLostError,
    RoundTimeoutError,
    RoundVoidError,
    TransportError,
)
from diloco.membership import View
from diloco.transport import InProcessTransport, LeaderTransport, Pending, ReplicaGroup, Transport, open_replica_group
from tests.faults import Fault, FaultyTransport
from tests.processes import Processes, receive, report
from tests.same import same_values
from tests.transport.contract import SIZE, MakeEndpoints, TransportContract, contribution

CPU = torch.device("cpu")


def open_group(position: int, size: int, folder: Path, *, replica: int = 0, timeout_s: float = 300.0) -> ReplicaGroup:
    store = dist.FileStore(str(folder / "store"))
    return open_replica_group(store, replica=replica, position=position, size=size, device=CPU, timeout_s=timeout_s)


def rank_tells(rank: int, folder: Path) -> None:
    """Two replicas of three ranks rendezvous through one store."""
    replica, position = divmod(rank, 3)
    group, numbers = open_group(position, 3, folder, replica=replica), [10 * replica + s for s in range(3)]
    said = numbers[position]
    assert (group.replica, group.position, group.size, group.leads) == (replica, position, 3, position == 0)
    assert group.gather(torch.tensor([said, -said])).tolist() == [[number, -number] for number in numbers]
    text = "é\udcff"  # a path that is not UTF-8 ended this rank, and the others waited
    assert group.gather_texts(text * position) == ["", text, 2 * text]
    assert group.share({"said": said, "words": ["é", None, 0.1]}) == {"said": numbers[0], "words": ["é", None, 0.1]}
    assert group.share(None) is None
    assert group.share_(torch.full((2, 2), said)).tolist() == [[numbers[0]] * 2] * 2
    assert group.share_(torch.empty(0)).tolist() == []
    assert [group.all(position < limit) for limit in (1, 3)] == [False, True]
    assert [group.any(position >= limit) for limit in (2, 3)] == [True, False]
    assert group.done_by_leader(lambda: said) == numbers[0]

    class OwnError(CheckpointError):
        """Of a plug-in, with an attribute that only other errors of ours take: its ranks ended with a TypeError."""

        def __init__(self, message: str) -> None:
            super().__init__(message)
            self.round = "fragment 2"

    def fails() -> None:
        raise OwnError("the disk is full")

    def one_fails() -> None:
        with group.all_or_none():
            if position == 1:
                fails()

    with pytest.raises(CheckpointError, match=r"^the disk is full$"):  # that of position 0, on all
        group.done_by_leader(fails)
    kind: type[Exception] = CheckpointError if position == 1 else ReplicaLostError
    with pytest.raises(kind, match=f"^{'' if position == 1 else '.* other ranks: position 1: '}the disk is full$"):
        one_fails()
    with group.all_or_none():
        pass
    group.close()


def test_the_ranks_of_a_replica_share_values_decisions_and_errors(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(6, rank_tells, tmp_path)
        processes.results(timeout_s=300)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [5, 6, 7, 16])
def test_rows_are_those_of_tensor_split(size: int, batch_size: int) -> None:
    group = ReplicaGroup()
    group.size = size
    batch = torch.arange(batch_size)
    for position, expected in enumerate(batch.tensor_split(size)):
        group.position = position
        assert torch.equal(batch[group.rows(batch_size)], expected)


def test_a_batch_of_fewer_rows_than_ranks_is_refused() -> None:
    group = ReplicaGroup()
    group.size = 3
    with pytest.raises(ConfigurationError, match="a batch of at least 3 sequences, one per rank, got 2"):
        group.rows(2)


def rank_waits(position: int, folder: Path) -> str:
    group = open_group(position, 2, folder, replica=4)
    report("met")
    receive(timeout_s=300)
    try:
        group.share({"nobody": "there"})
        group.gather(torch.ones(1))
    except ReplicaLostError as error:
        return f"{error.replicas} {error}"
    return "nothing was noticed"


def test_the_loss_of_a_rank_is_an_error_that_names_the_replica(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(2, rank_waits, tmp_path)
        assert [processes.next_report(rank, timeout_s=300) for rank in (0, 1)] == ["met", "met"]
        processes.kill(1)
        processes.send(0, "continue")
        words = processes.results(timeout_s=300)[0]
    assert words.startswith("(4,) A rank of replica 4 has ended or does not respond")


def test_ranks_that_do_not_come_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    words = "Position 0 of replica 7 did not find the other 1 ranks of its replica within 0.5 s"
    with pytest.raises(RendezvousError, match=words):
        open_group(0, 2, tmp_path, replica=7, timeout_s=0.5)
    assert not dist.is_initialized()


def test_errors_that_are_no_loss_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a bug"), ReplicaGroup().watched():
        raise RuntimeError("a bug")


# One rank communicates with the other replicas, and all get the same results.


class TestLeaderOfOneRank(TransportContract):
    @pytest.fixture
    def make_endpoints(self) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            hub = InProcessTransport(num_replicas)
            return [LeaderTransport(ReplicaGroup(), hub.endpoint(m)) for m in range(num_replicas)]

        return make


def rank_hears(position: int, folder: Path) -> None:
    """Replica 1 of two has three ranks. Position 0 also plays replica 0, in the same process."""
    group, fault = open_group(position, 3, folder, replica=1), Fault(kind="drop", round=RoundId(0, 1), replica=0)
    hub = FaultyTransport(2, faults=[fault], round_timeout_s=0.0) if group.leads else None
    transport = LeaderTransport(group, hub.endpoint(1) if hub else None)

    def begun(outer_step: int, digest: str = "even") -> Pending:
        if hub:
            hub.endpoint(0).average(contribution(0, outer_step=outer_step, digest="even"))
        return transport.average(contribution(1, outer_step=outer_step, digest=digest))

    average, expected = begun(0).wait(), weighted_mean([contribution(m) for m in range(2)])
    assert torch.equal(average.values, expected.values)
    assert average.integers is not None
    assert (average.integers.tolist(), average.contributors) == ([0, 7], (0, 1))
    assert (transport.replica, transport.view) == (1, View.of(2))
    assert (transport.sent_bytes, transport.received_bytes) == (4 * SIZE + 10, 4 * SIZE + 10)

    with pytest.raises(RoundVoidError, match="replica 0 sent nothing") as void:
        begun(1).wait()
    assert void.value.round == "fragment 0, outer step 1"
    with pytest.raises(DivergedError) as diverged:
        begun(2, "odd").wait()
    assert (diverged.value.donor, diverged.value.digest, diverged.value.replicas) == (0, "even", (1,))
    with pytest.raises(RoundTimeoutError) as late:
        transport.average(contribution(1, outer_step=3)).wait()
    assert late.value.replicas == (0,)
    with pytest.raises(TransportError, match="already contributed"):
        transport.average(contribution(1, outer_step=3))

    with pytest.raises(TransportError, match="it has published nothing"):
        transport.fetch(0, [0]).result()
    state = {"global_params": torch.arange(5.0), "outer_step": 7, "slots": {"momentum": torch.ones(5)}, "none": {}}
    if hub:
        hub.endpoint(0).publish(lambda fragment: {"fragment": fragment, **state})
        hub.endpoint(0).agree({"codec": "fp4"})
    assert same_values(transport.fetch(3, [0]).result(), {"fragment": 3, **state})
    with pytest.raises(ConfigurationError, match="has codec = fp4"):
        transport.agree({"codec": "int8"})

    assert transport.shared(lambda leader: [leader.replica, "words"]) == [1, "words"]
    for error in (KeyError("nobody foresaw it"), KeyboardInterrupt("Ctrl-C")):  # the latter was a TypeError elsewhere
        act = mock.Mock(side_effect=error)
        kind = type(error) if group.leads else ReplicaLostError
        with pytest.raises(kind, match=f"{'' if group.leads else 'Position 0 of replica 1 .*'}{error.args[0]}"):
            transport.shared(act)
    own = type("OwnError", (CodecError,), {})  # of a plug-in; it was an AttributeError elsewhere
    with pytest.raises(own if group.leads else CodecError, match="it can't encode this"):
        transport.shared(mock.Mock(side_effect=own("it can't encode this")))
    transport.tick()
    transport.publish(lambda fragment: {})
    group.close()


def test_all_ranks_hear_what_the_leader_hears(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(3, rank_hears, tmp_path)
        processes.results(timeout_s=300)
