"""The ranks of one replica, and what they tell each other.

A replica of S ranks has a process group of its own, in which rank s is the replica's position s. It knows nothing of
the other replicas, so that a failure there does not reach it, nor the other way round.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from diloco.errors import ConfigurationError, RendezvousError, ReplicaLostError

__all__ = ["ReplicaGroup", "open_replica_group"]

_ENDED: list[dist.ProcessGroup] = []
"""Groups that are not in use any more. If DistributedDataParallel were the last to hold one, it would free it while it
holds the interpreter's lock, and wait forever for a thread of the group that waits for that lock."""

atexit.register(_ENDED.clear)


class ReplicaGroup:
    """This rank's place among the ranks of its replica. A lone rank is a group of one, and nothing is sent.

    All methods must be called on all ranks in the same order, and return the same on all of them.

    Args:
        process_group: of the replica's ranks, in which CPU tensors can travel; None: this rank is the whole replica.
        replica: m.

    >>> alone = ReplicaGroup()
    >>> alone.position, alone.size, alone.share({"step": 3}), alone.gather_texts("here")
    (0, 1, {'step': 3}, ['here'])
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, replica: int = 0) -> None:
        self.process_group = process_group
        self.replica = replica
        self.position = 0 if process_group is None else process_group.rank()  # of this rank, 0 <= position < size
        self.size = 1 if process_group is None else process_group.size()  # S
        self._meshes: dict[str, DeviceMesh] = {}

    @property
    def leads(self) -> bool:
        """Whether this is the rank at position 0, which speaks for the replica where one must."""
        return self.position == 0

    def rows(self, batch_size: int) -> slice:
        """Which sequences of the replica's batch this rank computes: in order, as evenly as possible.

        Raises:
            ConfigurationError: if some rank would have none.
        """
        if batch_size < self.size:
            raise ConfigurationError(
                f"a batch of {batch_size} sequences was given to a replica of {self.size} ranks. It needs at least "
                f"{self.size}, one for each rank."
            )
        share, more = divmod(batch_size, self.size)  # as tensor_split: the first ones have one more
        start = self.position * share + min(self.position, more)
        return slice(start, start + share + (self.position < more))

    def gather(self, value: Tensor) -> Tensor:
        """``(size, ...)``: the ``value`` of every rank, in order; a sum of them has the same bits on all ranks."""
        if self.process_group is None:
            return value.unsqueeze(0)
        gathered = torch.empty((self.size, *value.shape), dtype=value.dtype, device=value.device)
        with self.watched():
            dist.all_gather(list(gathered.unbind()), value.contiguous(), group=self.process_group)
        return gathered

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` holds on every rank."""
        return bool(self.gather(torch.tensor(flag, dtype=torch.uint8)).all())

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` holds on some rank."""
        return bool(self.gather(torch.tensor(flag, dtype=torch.uint8)).any())

    def gather_texts(self, text: str) -> list[str]:
        """The ``text`` of every rank, in order."""
        data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor(data.numel()))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.gather(padded)
        return [rows[position, : length - 1].numpy().tobytes().decode() for position, length in enumerate(lengths)]

    def share(self, value: Any) -> Any:
        """The ``value`` of position 0, which JSON must be able to hold; those of the others are ignored."""
        if self.process_group is None:
            return value
        data = json.dumps(value if self.leads else None).encode()
        length = self.share_(torch.tensor(len(data)))
        room = torch.frombuffer(bytearray(data.ljust(int(length))[: int(length)]), dtype=torch.uint8)
        return json.loads(self.share_(room).numpy().tobytes())

    def share_(self, values: Tensor) -> Tensor:
        """Overwrite ``values``, contiguous and of the same shape and dtype on all ranks, with those of position 0."""
        if self.process_group is not None and values.numel():
            with self.watched():
                dist.broadcast(values, group=self.process_group, group_src=0)
        return values

    def done_by_leader(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on position 0 only; its result, which JSON must be able to hold, on all ranks.

        Raises:
            Exception: what ``act`` raises, on position 0.
            ReplicaLostError: elsewhere, when that happened.
        """
        outcome, error = None, None
        if self.leads:
            try:
                outcome = act()
            except Exception as raised:  # raised again below, once the others know
                error = raised
        told = self.share({"failed": repr(error) if error else "", "value": outcome})
        if error is not None:
            raise error
        if told["failed"]:
            raise ReplicaLostError(
                f"position 0 of replica {self.replica} has failed, and position {self.position} can't go on without "
                f"it: {told['failed']}",
                replicas=[self.replica],
            )
        return told["value"]

    def required_process_group(self) -> dist.ProcessGroup:
        """The process group, where one is needed.

        Raises:
            ConfigurationError: if there is none.
        """
        if self.process_group is None:
            raise ConfigurationError(
                "a replica of one rank without a process group was given where a process group is needed. Open one, "
                "also for one rank, with open_replica_group."
            )
        return self.process_group

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All ranks in one dimension, for tensors on ``device``."""
        if device.type not in self._meshes:
            self._meshes[device.type] = DeviceMesh.from_group(self.required_process_group(), device.type)
        return self._meshes[device.type]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around communication with the other ranks: turns their loss into a `ReplicaLostError` that says whose."""
        try:
            yield
        except RuntimeError as error:
            if not _is_of_the_network(error):
                raise
            raise ReplicaLostError(
                f"a rank of replica {self.replica} is gone or silent, so position {self.position} of it can't go on: "
                f"{str(error).splitlines()[0]} The other replicas go on. Start this one again.",
                replicas=[self.replica],
            ) from error

    def close(self) -> None:
        """End the process group, if there is one."""
        if self.process_group is not None:
            _ENDED.append(self.process_group)
            dist.destroy_process_group(self.process_group)
            self.process_group = None


def open_replica_group(
    store: Store, *, replica: int, position: int, size: int, device: torch.device, timeout_s: float
) -> ReplicaGroup:
    """Meet the other ranks of this replica. It becomes torch.distributed's default process group.

    gloo on the CPU; on CUDA also NCCL for the tensors that lie there, after ``torch.cuda.set_device``.

    Args:
        store: that all ranks of the replica reach; other replicas may use it, too.
        device: that the model is trained on.
        timeout_s: for the ranks to find each other, and after which a silent one counts as gone.

    Raises:
        ConfigurationError: if torch.distributed has a default process group already.
        RendezvousError: if not all are there in time.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            f"torch.distributed already has a process group of {dist.get_world_size()}. Use ReplicaGroup(that group), "
            "or a process without one."
        )
    on_cuda = device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=PrefixStore(f"diloco/replica-{replica}", store),
            rank=position,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"position {position} of replica {replica} did not find the other {size - 1} ranks of it within "
            f"{timeout_s:g} s: {str(error).splitlines()[0]}",
            replicas=[replica],
        ) from error
    return ReplicaGroup(dist.group.WORLD, replica=replica)


def _is_of_the_network(error: RuntimeError) -> bool:
    # gloo raises plain errors that name its source files
    return isinstance(error, dist.DistError) or "gloo" in str(error)
