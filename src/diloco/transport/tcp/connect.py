"""Where ranks meet over TCP: at an address that all know. For replicas of the command, and a loop of your own."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from diloco.algorithm import check_choice, check_replica
from diloco.errors import ConfigurationError, RendezvousError, TransportError
from diloco.protocol import Entry, Rules
from diloco.transport.address import Address, local_host_towards, parse_address, parse_listen
from diloco.transport.base import Transport
from diloco.transport.connections.connection_manager import ConnectionManager
from diloco.transport.connections.sockets import Credentials, TcpStreams
from diloco.transport.connections.streams import within
from diloco.transport.peers.connect import MeetingPlace, connect
from diloco.transport.peers.directory import Lost
from diloco.transport.peers.transport import OnChange, PeerTransport
from diloco.transport.private_key import load_key
from diloco.transport.replica_group import LeaderTransport, ReplicaGroup
from diloco.transport.secret import TurnedAwayError, check_secret
from diloco.transport.tcp.doctor import serve_probes
from diloco.transport.tcp.rendezvous import TcpDirectory

PORT_TIMEOUT_S = 5.0  # how long the owner of the rendezvous port may take to answer as a diloco or release the port
_LISTEN_AGAIN_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Place(MeetingPlace):
    """The number of this rank, where it listens, and the address at which it meets the others."""

    replica: int  # m
    num_replicas: int  # M
    # where they meet: the address of rank 0, which listens there, or of any replica of a running training
    rendezvous: Address
    position: int = 0  # position of this rank within its replica
    ranks_per_replica: int = 1  # S
    # address of this machine to listen at ("": the one from which the rendezvous is reached), and ports of which the
    # first free one is taken (0: any)
    listen: tuple[str, range] = ("", range(1))
    # the shared secret, see `diloco.transport.secret`; "": anybody may take part
    secret: str = field(default="", repr=False)
    # the file of its private key, which shows that a process replaces the one before it; None: a new one each time
    identity: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "secret", check_secret(self.secret))
        object.__setattr__(self, "replica", check_replica(self.replica, self.num_replicas))  # maybe one of NumPy's

    @property
    def rank(self) -> int:
        return self.replica * self.ranks_per_replica + self.position

    def transport(self, rules: Rules, lost: Lost | None, on_change: OnChange | None = None) -> PeerTransport:
        rules = replace(rules, rank=self.rank, ranks_per_replica=self.ranks_per_replica)
        if lost is None:
            key = None if self.identity is None else load_key(self.identity)
            streams = TcpStreams(Credentials(secret=self.secret, key=key))
        else:
            streams = TcpStreams(lost.directory.connections.streams.credentials, lost.listening)
        transport = PeerTransport(rules, streams, on_change=on_change)
        serve_probes(transport.connections)
        return transport

    def directory(self, transport: PeerTransport, held_step: int, lost: Lost | None) -> TcpDirectory:
        if lost is None:
            meeting, gathers = self._begin(transport)
            others: tuple[Entry, ...] = ()
        else:
            before, connections = lost.directory.transport, transport.connections
            connections.most_ranks = before.connections.most_ranks
            connections.listen(before.address.host, range(0), before.address.host)
            others, meeting, gathers = tuple(before.entries().values()), self.rendezvous, False
        streams, facts = transport.connections.streams, transport.rules.facts
        mine = Entry(self.rank, str(transport.address), streams.me, facts, held_step)
        return TcpDirectory(transport, (mine, *others), meeting, gathers=gathers, held_step=held_step, lost=lost)

    def _begin(self, transport: PeerTransport) -> tuple[Address, bool]:
        """Listen; return the address at which all meet, and whether this rank listens there."""
        connections, (host, ports) = transport.connections, self.listen
        connections.most_ranks = self.num_replicas * self.ranks_per_replica
        try:
            host = host or local_host_towards(self.rendezvous)
        except OSError as error:
            raise RendezvousError(
                f"there is no route to the rendezvous {self.rendezvous.host!r}: {error}. Use another name or an "
                "address."
            ) from error
        hosts = self.rank == 0 and connections.call(_host_rendezvous(connections, self.rendezvous, host))
        if not hosts:
            connections.listen(host, ports, host)
        return connections.address if hosts else self.rendezvous, hosts


async def _host_rendezvous(connections: ConnectionManager, address: Address, host: str) -> bool:
    """Listen at the rendezvous as rank 0, and return whether this rank does.

    It does not if another replica listens there, or if the address belongs to another machine. If another
    program does, which may be ending, the search reports it in the end.
    """
    deadline_s = connections.loop.time() + PORT_TIMEOUT_S
    while True:
        try:
            await connections.listen_at(address.host, range(address.port, address.port + 1), host)
            return True
        except TransportError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE):
                return False
        try:
            _, writer = await within(PORT_TIMEOUT_S, connections.open(address))
            writer.transport.abort()
            return False
        except (TurnedAwayError, TransportError):
            return False
        except (OSError, EOFError):
            if connections.loop.time() > deadline_s:
                return False
        await asyncio.sleep(_LISTEN_AGAIN_S)


@contextmanager
def connect_tcp(
    *,
    replica: int,
    num_replicas: int,
    rendezvous: str,
    ranks: Literal["alone", "whole", "sharded"] = "alone",
    on_failure: Literal["stop", "continue"] = "stop",
    facts: Mapping[str, str] | None = None,
    listen: str = ":0",
    secret: str = "",
    **rules: Any,
) -> Iterator[Transport]:
    """Connect to the other replicas, which do the same in processes of their own, and yield the transport.

    The end of the ``with`` block waits until all replicas have reached it. Replicas that take more steps are notified
    that this one left, and treat it as lost. After an error the connections end at once.

    Args:
        replica: number m of this replica, counted from 0.
        num_replicas: number of replicas M.
        rendezvous: ``HOST:PORT`` of a machine that all replicas can reach; replica 0 listens there.
        ranks: ``alone``: this process is a whole replica, and torch.distributed may be used for anything else.
            Otherwise all ranks of torch.distributed form the replica, and all of them must call this function.
            ``whole``: each rank holds the whole model (DistributedDataParallel), and the first rank communicates for
            all. ``sharded``: each rank holds shards of the model (FSDP2) and communicates for its shards.
        on_failure: what happens when a replica is lost. ``stop``: every later round raises `ReplicaLostError` on the
            others. ``continue``: the others continue in a smaller view, and those that are too few wait until enough
            are back, at most `Rules.guard_s`.
        facts: what must be the same on all replicas, name -> value; a difference raises before training starts.
        listen: where to listen, ``HOST:PORT`` or ``HOST:FIRST-LAST``; default: any port of the address of this machine
            from which the rendezvous is reached.
        secret: what all replicas prove to know, as ``diloco secret`` writes it; default: anybody may take part.
        rules: any field of `diloco.protocol.Rules`, such as ``round_timeout_s=60``.

    Raises:
        ConfigurationError: if an argument can't work; at the call, before any connection.
        RendezvousError: if the replicas do not find each other in time, are incompatible, or already train.
            (`diloco.transport.connect` can join a running training.)

    >>> with connect_tcp(replica=0, num_replicas=1, rendezvous="127.0.0.1:0") as transport:
    ...     transport.view
    View(id=0, members=(0,))
    """
    check_choice("ranks", ranks, ("alone", "whole", "sharded"))
    check_choice("on_failure", on_failure, ("stop", "continue"))
    check_replica(replica, num_replicas)
    settings = Rules.of(rules, continue_without_lost=on_failure == "continue", facts=facts or {})
    group = ReplicaGroup(_process_group(), replica=replica) if ranks != "alone" else ReplicaGroup(replica=replica)
    position, size = (group.position, group.size) if ranks == "sharded" else (0, 1)
    place = Place(
        replica=replica,
        num_replicas=num_replicas,
        position=position,
        ranks_per_replica=size,
        rendezvous=parse_address(rendezvous, key="the rendezvous"),
        listen=parse_listen(listen, key="listen"),
        secret=secret,
    )
    opened: list[PeerTransport] = []

    def begin() -> None:
        directory = connect(place, settings)
        opened.append(directory.transport)
        if directory.joining:
            raise RendezvousError(
                f"replica {replica} was to start a run, but the other replicas are already running one. Choose another "
                "rendezvous, or join the run."
            )

    group = group if ranks == "whole" else ReplicaGroup()  # the ranks for which one communicates
    try:
        group.done_by_leader(begin)
        (mine,) = opened or (None,)
        yield mine if mine is not None and group.size == 1 else LeaderTransport(group, mine)
        group.done_by_leader(lambda: opened[0].finish())
    finally:
        for transport in opened:
            transport.close()


def _process_group() -> dist.ProcessGroup | None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and not dist.is_initialized():
        raise ConfigurationError(
            f"A launcher has started {launched} processes (WORLD_SIZE), but torch.distributed is not initialised, so "
            "each process would act as a whole replica. Call init_process_group first, or create "
            "TrainingArguments(...) or Accelerator(), which call it."
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    backend = "cpu:gloo,cuda:nccl" if "nccl" in dist.get_backend() else "gloo"
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group
