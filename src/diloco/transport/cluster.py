"""Connecting all ranks of torch.distributed as replicas, for the command or a loop of your own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from diloco.algorithm import check_choice
from diloco.errors import ConfigurationError
from diloco.transport.base import Transport
from diloco.transport.process_group import ProcessGroupTransport
from diloco.transport.replica_group import LeaderTransport, ReplicaGroup
from diloco.transport.roll_call import RollCall, fresh_store

_CONNECTIONS = itertools.count()


def open_cluster(
    peers: dist.ProcessGroup, *, whole: bool, silence_s: float, timeout_s: float, group: ReplicaGroup | None = None
) -> tuple[Transport, RollCall]:
    """Connect the ranks of torch.distributed as replicas, and return this rank's transport and roll call.

    All of them must call it. Close both in the end, the roll call first.

    Args:
        peers: the ranks at the position of this one, one of each replica.
        whole: whether each rank holds the whole model; then position 0 communicates for its replica.
        silence_s, timeout_s: see `connect_process_group`.
        group: the ranks of this replica; None: they are found out.
    """
    rank, number = dist.get_rank(), next(_CONNECTIONS)
    store = PrefixStore(f"diloco/connection-{number}", _get_default_store())
    roll = RollCall(
        fresh_store(store, rank, dist.get_world_size(), timeout_s), rank, dist.get_world_size(), silence_s=silence_s
    )
    try:
        lists = roll.meet("peers", json.dumps(sorted(dist.get_process_group_ranks(peers))), timeout_s)
        columns = sorted(tuple(json.loads(text)) for text in set(lists))  # by position
        if sorted(itertools.chain(*columns)) != list(range(roll.size)) or len({*map(len, columns)}) > 1:
            raise ConfigurationError(
                f"The given groups of replicas have the ranks {columns}. Each of the {roll.size} ranks must be in one "
                "of them, and all must have the same size, as in init_device_mesh(..., (M, S), ('replica', 'shard'))."
            )
        position = next(index for index, column in enumerate(columns) if rank in column)
        replica, rows = columns[position].index(rank), [*zip(*columns, strict=True)]  # by replica
        for member, row in enumerate(rows):
            for s, each in enumerate(row):
                roll.names[each] = f"rank {each} (replica {member}" + (f", position {s})" if len(row) > 1 else ")")
        # collectives of a rank's own, in the same order on all ranks
        groups = {
            ranks: _new_group(ranks, timeout_s) for ranks in dict.fromkeys([*columns, *rows] if whole else columns)
        }
        talking = columns[0] if whole else tuple(itertools.chain(*rows))
        everyone = _new_group(tuple(sorted(talking)), timeout_s)
        transport = None
        if rank in talking:
            ranks = [sorted(talking).index(each) for each in talking]
            transport = ProcessGroupTransport(
                groups[columns[position]], everyone, ranks, roll, talking, timeout_s=timeout_s
            )
        if whole and len(columns) > 1:
            return LeaderTransport(group or ReplicaGroup(groups[rows[replica]], replica=replica), transport), roll
        assert transport is not None, "all ranks communicate"
        return transport, roll
    except BaseException as error:
        roll.close(str(error))
        raise


def _new_group(ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup:
    backend = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend() else "gloo"
    group: dist.ProcessGroup = dist.new_group(list(ranks), timedelta(seconds=timeout_s), backend)
    return group


@contextmanager
def connect_process_group(
    mesh_or_group: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    ranks: Literal["whole", "sharded"] = "sharded",
    silence_s: float = 15.0,
    round_timeout_s: float = 600.0,
) -> Iterator[Transport]:
    """Make replicas of the ranks of torch.distributed, which must be initialised, and yield this rank's transport.

    All ranks must call it. It makes groups of its own, so a loop may use the given ones meanwhile. The end of the
    ``with`` block waits until all ranks have reached it. If a rank is lost, every round raises `ReplicaLostError`,
    which names it, on all others. One that is then inside another collective stays there until torchrun ends it, or
    until that collective fails or times out.

    Args:
        mesh_or_group: a device mesh whose dimension "replica" has one rank of each replica, or which has one dimension;
            or the process group of such ranks; None: each rank is a replica.
        ranks: how the ranks of a replica hold the model. ``sharded``: each holds a shard of each parameter (FSDP2), and
            exchanges it with its peers. ``whole``: each holds all of it (DistributedDataParallel), and the first one
            communicates.
        silence_s: a rank that gives no sign of life for this long is lost, or for a third of it if a connection has
            broken.
        round_timeout_s: a round that takes longer ends the run.

    Raises:
        ConfigurationError: if torch.distributed is not initialised, or the groups do not divide its ranks.
        RendezvousError: if not all ranks call this in time.
    """
    check_choice("ranks", ranks, ("whole", "sharded"))
    if not dist.is_initialized():
        raise ConfigurationError(
            "connect_process_group needs torch.distributed. Start the program with torchrun and call "
            "init_process_group first; without them, use connect_tcp."
        )
    group = mesh_or_group
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or ()
        if "replica" not in names and group.ndim > 1:
            raise ConfigurationError(f"The mesh has the dimensions {names}, but none is called 'replica'.")
        group = group.get_group("replica" if "replica" in names else 0)
    peers = dist.group.WORLD if group is None else group
    assert peers is not None, "it is initialised"
    transport, roll = open_cluster(peers, whole=ranks == "whole", silence_s=silence_s, timeout_s=round_timeout_s)
    failed = ""
    try:
        yield transport
        roll.finish()
    except BaseException as error:
        failed = str(error) or repr(error)
        raise
    finally:
        roll.close(failed)
        transport.close()
