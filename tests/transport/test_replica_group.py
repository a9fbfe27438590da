"""The communication between the ranks of a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diloco.errors import CheckpointError, ConfigurationError, RendezvousError, ReplicaLostError
from diloco.transport import ReplicaGroup, open_replica_group
from tests.processes import Processes, receive, report

CPU = torch.device("cpu")


def open_group(position: int, size: int, folder: Path, *, replica: int = 0, timeout_s: float = 300.0) -> ReplicaGroup:
    store = dist.FileStore(str(folder / "store"))
    return open_replica_group(store, replica=replica, position=position, size=size, device=CPU, timeout_s=timeout_s)


def rank_tells(rank: int, folder: Path) -> dict[str, Any]:
    """Two replicas of three ranks that rendezvous through one store."""
    replica, position = divmod(rank, 3)
    group = open_group(position, 3, folder, replica=replica)
    said = 10 * replica + position

    def fails() -> None:
        raise CheckpointError("the disk is full")

    failure = ""
    try:
        group.done_by_leader(fails)
    except (CheckpointError, ReplicaLostError) as error:
        failure = f"{type(error).__name__}: {error}"
    try:
        with group.all_or_none():
            if position == 1:
                fails()
    except (CheckpointError, ReplicaLostError) as error:
        failure += f" | {type(error).__name__}: {error}"
    with group.all_or_none():
        pass
    found = {
        "place": (group.replica, group.position, group.size, group.leads),
        "gathered": group.gather(torch.tensor([said, -said])).tolist(),
        "scalars": group.gather(torch.tensor(float(said))).tolist(),
        "texts": group.gather_texts("é" * position),
        "shared": group.share({"said": said, "words": ["é", None, 0.1]}),
        "nothing": group.share(None),
        "overwritten": group.share_(torch.full((2, 2), said)).tolist(),
        "empty": group.share_(torch.empty(0)).tolist(),
        "all": [group.all(position < limit) for limit in (1, 3)],
        "any": [group.any(position >= limit) for limit in (2, 3)],
        "done": group.done_by_leader(lambda: said),
        "failure": failure,
    }
    group.close()
    return found


def test_each_replica_by_itself(tmp_path: Path) -> None:
    with Processes() as processes:
        processes.start(6, rank_tells, tmp_path)
        ranks = processes.results(timeout_s=300)
    for rank, found in ranks.items():
        replica, position = divmod(rank, 3)
        numbers = [10 * replica + s for s in range(3)]
        failure = found.pop("failure")
        failure, of_block = failure.split(" | ")
        assert of_block.startswith("CheckpointError: the disk is full" if position == 1 else "ReplicaLostError")
        assert ("other ranks: position 1: the disk is full" in of_block) == (position != 1)
        assert failure == "CheckpointError: the disk is full", "of position 0 alone"
        assert found == {
            "place": (replica, position, 3, position == 0),
            "gathered": [[number, -number] for number in numbers],
            "scalars": [float(number) for number in numbers],
            "texts": ["", "é", "éé"],
            "shared": {"said": numbers[0], "words": ["é", None, 0.1]},
            "nothing": None,
            "overwritten": [[numbers[0]] * 2] * 2,
            "empty": [],
            "all": [False, True],
            "any": [True, False],
            "done": numbers[0],
        }


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
