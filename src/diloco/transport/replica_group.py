"""The ranks of one replica and the communication between them.

A replica of S ranks has its own process group, in which rank s is the replica's position s. The group contains no rank
of another replica, so a failure in one replica does not spread to the others through it.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from diloco import errors
from diloco.algorithm import Contribution
from diloco.errors import ConfigurationError, DiLoCoError, RendezvousError, ReplicaLostError
from diloco.events import PeerTraffic, Site
from diloco.membership import View
from diloco.protocol import Average
from diloco.state_tree import flatten, unflatten
from diloco.transport.base import Pending, SnapshotSource, Transport
from diloco.waiting import at_once

_ENDED: list[dist.ProcessGroup] = []
"""Groups that are no longer in use. If DistributedDataParallel held the last reference to one, it would free the group
while holding the GIL and deadlock with a thread of the group that waits for the GIL."""

atexit.register(_ENDED.clear)


class ReplicaGroup:
    """The ranks of one replica, as seen by one of them. A lone rank is a group of one and sends nothing.

    All ranks must call the methods that communicate in the same order, and get the same results.

    Args:
        process_group: the process group of the replica's ranks, which must support CPU tensors; None means that this
            rank is the whole replica.
        replica: the replica's number m.

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
        """Whether this rank is at position 0, which represents the replica where a single rank has to."""
        return self.position == 0

    def rows(self, batch_size: int) -> slice:
        """Return the rows of the replica's batch that this rank computes: in order and divided as evenly as possible.

        Raises:
            ConfigurationError: if a rank would have none.
        """
        if batch_size < self.size:
            raise ConfigurationError(
                f"A replica of {self.size} ranks needs a batch of at least {self.size} sequences, one per rank, got "
                f"{batch_size}."
            )
        share, more = divmod(batch_size, self.size)  # as in tensor_split, the first ranks get one more
        start = self.position * share + min(self.position, more)
        return slice(start, start + share + (self.position < more))

    def gather(self, value: Tensor) -> Tensor:
        """Return the ``value`` of every rank in order, ``(size, ...)``; their sum has the same bits on all ranks."""
        return self.begin_gather(value)()

    def begin_gather(self, value: Tensor, /) -> Callable[[], Tensor]:
        """Begin to `gather`, and return a function that waits for the result and returns it."""
        if self.process_group is None:
            return lambda: value.unsqueeze(0)
        gathered = torch.empty((self.size, *value.shape), dtype=value.dtype, device=value.device)
        with self.watched():
            work = dist.all_gather(list(gathered.unbind()), value.contiguous(), group=self.process_group, async_op=True)
        return self._result(work, gathered)

    def begin_exchange(self, values: Tensor, sends: Sequence[int], receives: Sequence[int], /) -> Callable[[], Tensor]:
        """Begin to send each rank s the next ``sends[s]`` of ``values``, ``(n,)``.

        Returns:
            A function that waits for the ``receives[s]`` values from each rank and returns them in order, ``(m,)``.
        """
        if self.process_group is None:
            return lambda: values
        received = values.new_empty(sum(receives))
        with self.watched():
            work = dist.all_to_all_single(
                received, values, list(receives), list(sends), group=self.process_group, async_op=True
            )
        return self._result(work, received)

    def _result(self, work: dist.Work, result: Tensor) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            with self.watched():
                work.wait()
            return result

        return wait

    def all(self, flag: bool) -> bool:
        return bool(self.gather(torch.tensor(flag, dtype=torch.uint8, device="cpu")).all())

    def any(self, flag: bool) -> bool:
        return bool(self.gather(torch.tensor(flag, dtype=torch.uint8, device="cpu")).any())

    def gather_texts(self, text: str) -> list[str]:
        # a path in an error may not be UTF-8, and the other ranks wait
        data = torch.frombuffer(bytearray(text.encode(errors="surrogatepass") + b"\0"), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor(data.numel(), dtype=torch.int64, device="cpu"))]
        padded = data.new_zeros(max(lengths))
        padded[: data.numel()] = data
        rows = self.gather(padded)
        texts = (row[: length - 1].numpy().tobytes() for row, length in zip(rows, lengths, strict=True))
        return [each.decode(errors="surrogatepass") for each in texts]

    def share(self, value: Any) -> Any:
        """Return the ``value`` of position 0, which JSON must be able to represent; other ranks' values are ignored."""
        if self.process_group is None:
            return value
        data = json.dumps(value if self.leads else None).encode()
        length = self.share_(torch.tensor(len(data), dtype=torch.int64, device="cpu"))
        room = torch.frombuffer(bytearray(data.ljust(int(length))[: int(length)]), dtype=torch.uint8)
        return json.loads(self.share_(room).numpy().tobytes())

    def share_(self, values: Tensor) -> Tensor:
        """Overwrite ``values`` with those of position 0 and return them.

        They must be contiguous and have the same shape and dtype on all ranks.
        """
        if self.process_group is not None and values.numel():
            with self.watched():
                dist.broadcast(values, group=self.process_group, group_src=0)
        return values

    def done_by_leader(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on position 0 only, and return its result on all ranks; JSON must be able to represent it.

        Raises:
            DiLoCoError: what ``act`` raises, on every rank with the same class and message.
            BaseException: on position 0, if ``act`` raises any other error, such as Ctrl-C or a bug.
            ReplicaLostError: on the other ranks in that case; it names the error.
        """
        outcome: dict[str, Any] = {}
        raised: BaseException | None = None
        if self.leads:
            try:
                outcome["value"] = act()
            except BaseException as error:  # raised again below, once the other ranks know
                words = f"Position 0 of replica {self.replica} has failed, and none can continue without it: {error!r}"
                lost = ReplicaLostError(words, replicas=[self.replica])
                raised, outcome["error"] = error, _described(error if isinstance(error, DiLoCoError) else lost)
        outcome = self.share(outcome)
        if "error" in outcome:
            try:
                raise raised or _rebuilt(outcome["error"])
            finally:
                del raised  # the error refers to this frame, which keeps the caller's round alive
        return outcome["value"]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Make a block that each rank runs by itself, such as reading a file, fail on all ranks if it fails on any.

        The block must not communicate.

        Raises:
            Exception: on the ranks whose block raises it.
            ReplicaLostError: on the other ranks, if any rank's block raises.
        """
        raised: Exception | None = None
        try:
            yield
        except Exception as error:  # raised again below, once the other ranks know
            raised = error
        failures = self.failures(raised)
        if raised is not None:
            raise raised
        if failures:
            raise ReplicaLostError(
                f"Position {self.position} of replica {self.replica} can't continue without its other ranks: "
                f"{failures}",
                replicas=[self.replica],
            )

    def failures(self, raised: Exception | None) -> str:
        """Return what the ranks have raised, by position, from what this rank has raised; "" if none has."""
        texts = self.gather_texts("" if raised is None else (str(raised) or repr(raised)).rstrip("."))
        failed = [f"position {s}: {text}" if self.size > 1 else text for s, text in enumerate(texts) if text]
        return "; ".join(failed)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return a one-dimensional device mesh of all ranks, for tensors on ``device``."""
        assert self.process_group is not None, "a lone rank shards nothing"
        if device.type not in self._meshes:
            self._meshes[device.type] = DeviceMesh.from_group(self.process_group, device.type)
        return self._meshes[device.type]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn a network error inside the ``with`` block into a `ReplicaLostError` that names this replica."""
        try:
            yield
        except RuntimeError as error:
            if not is_of_the_network(error):
                raise
            raise ReplicaLostError(
                f"A rank of replica {self.replica} has ended or does not respond, so its position {self.position} "
                f"can't continue: {str(error).splitlines()[0]} The other replicas continue. Restart this replica.",
                replicas=[self.replica],
            ) from error

    def close(self) -> None:
        if self.process_group is not None:
            _ENDED.append(self.process_group)
            dist.destroy_process_group(self.process_group)
            self.process_group = None


def open_replica_group(
    store: Store, *, replica: int, position: int, size: int, device: torch.device, timeout_s: float
) -> ReplicaGroup:
    """Rendezvous with the other ranks of this replica, and return their group.

    The group becomes torch.distributed's default process group. It uses gloo, and for a CUDA device also NCCL for CUDA
    tensors; then call `diloco.devices.use_device` first.

    Args:
        store: a store that all ranks of the replica can reach; other replicas may use the same store.
        device: the device on which the model is trained.
        timeout_s: how long the ranks wait for each other at the start, and how long a rank may be silent in later
            communication before it counts as lost.

    Raises:
        RendezvousError: if not all ranks arrive in time.
    """
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
            f"Position {position} of replica {replica} did not find the other {size - 1} ranks of its replica within "
            f"{timeout_s:g} s: {str(error).splitlines()[0]}",
            replicas=[replica],
        ) from error
    return ReplicaGroup(dist.group.WORLD, replica=replica)


def is_of_the_network(error: RuntimeError) -> bool:
    # gloo raises plain RuntimeErrors whose messages name its source files
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class LeaderTransport(Transport):
    """The transport of one rank of a replica, which uses the transport of the replica's position 0.

    All ranks must call `agree`, `average`, `Pending.wait`, `fetch` and `shared` in the same order. An error on position
    0 is raised on every rank, with the same class and message.
    """

    shared_by_ranks = True

    def __init__(self, group: ReplicaGroup, transport: Transport | None) -> None:
        self.group = group
        self.transport = transport  # to the other replicas, at position 0; None on the other ranks
        self.replica = int(self.shared(lambda leader: leader.replica))

    @property
    def joining(self) -> bool:  # type: ignore[override]  # nobody sets it here
        return bool(self.shared(lambda leader: leader.joining))

    def average(self, contribution: Contribution) -> Pending:
        kept, round_id = list[Pending](), contribution.round
        self.shared(lambda leader: kept.append(leader.average(contribution)))

        def taken(_: Transport) -> dict[str, Any]:
            average = kept[0].wait()
            return vars(average) | {"round": None, "view": (average.view.id, average.view.members)}

        def wait() -> Average:
            fields = self.shared_tree(taken)
            return Average(**fields | {"round": round_id, "view": View(*fields["view"])})

        return Pending(wait)

    def agree(self, facts: Mapping[str, str]) -> None:
        self.shared(lambda leader: leader.agree(facts))

    def publish(self, source: SnapshotSource, version: Callable[[int], object] | None = None) -> None:
        if self.transport is not None:
            self.transport.publish(source, version)

    def fetch(
        self, fragment: int, donors: Sequence[int], expected_bytes: int | None = None
    ) -> Future[Mapping[str, Any]]:
        return at_once(self.shared_tree, lambda leader: dict(leader.fetch(fragment, donors, expected_bytes).result()))

    def tick(self) -> None:
        if self.transport is not None:
            self.transport.tick()

    def ranks(self) -> Collection[int]:
        group = self.group.process_group
        return () if group is None else dist.get_process_group_ranks(group)

    def traffic_by_peer(self) -> Mapping[str, PeerTraffic]:
        return self.transport.traffic_by_peer() if self.transport is not None else {}

    def announce_site(self, site: Site) -> None:
        if self.transport is not None:
            self.transport.announce_site(site)

    def sites(self) -> Mapping[int, Site]:
        return self.transport.sites() if self.transport is not None else {}

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.transport is not None:  # which tells the other ranks
            self.transport.load_state_dict(state)

    def shared(self, ask: Callable[[Transport], Any]) -> Any:
        """Call ``ask`` on position 0's transport, and return its result or raise its error on every rank.

        JSON must be able to represent the result. The view and traffic of every rank become those of position 0.
        """
        leader = self.transport
        try:
            return self.group.done_by_leader(lambda: None if leader is None else ask(leader))
        finally:  # also after an error of position 0, which a void round is
            self._follow_leader()

    def _follow_leader(self) -> None:
        """Make the view and the traffic of every rank those of position 0."""
        leader, told = self.transport, dict[str, Any]()
        if leader is not None:
            told = vars(leader.view) | {"sent_bytes": leader.sent_bytes, "received_bytes": leader.received_bytes}
        told = self.group.share(told)
        self.view = View(told["id"], tuple(told["members"]), tuple(told["order"]))
        self.sent_bytes, self.received_bytes = told["sent_bytes"], told["received_bytes"]

    def shared_tree(self, ask: Callable[[Transport], Any]) -> Any:
        """Do as `shared` for results that `diloco.state_tree` can represent; tensors keep their device type."""
        tensors: dict[str, Tensor] = {}

        def asked(leader: Transport) -> list[Any]:
            skeleton, found = flatten(ask(leader))
            tensors.update({name: tensor.contiguous() for name, tensor in found.items()})
            return [skeleton, {name: [str(t.dtype), list(t.shape), t.device.type] for name, t in tensors.items()}]

        skeleton, outlines = self.shared(asked)
        for name, (dtype, shape, device) in outlines.items():
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
            self.group.share_(tensors[name])
        return unflatten(skeleton, tensors)


def _described(error: DiLoCoError) -> dict[str, Any]:
    # the class of a plug-in's error may be unknown to the other ranks; all derive from `DiLoCoError`, which they know
    known = next(each for each in type(error).__mro__ if vars(errors).get(each.__name__) is each)
    _, first, *_ = taken = signature(known.__init__).parameters  # its words, which may be a part of the message
    fields = {name: value for name, value in vars(error).items() if name in taken}
    return {"class": known.__name__, "words": fields.pop(first, str(error)), "fields": fields}


def _rebuilt(described: Mapping[str, Any]) -> DiLoCoError:
    kind: type[DiLoCoError] = getattr(errors, described["class"])
    return kind(described["words"], **described["fields"])
