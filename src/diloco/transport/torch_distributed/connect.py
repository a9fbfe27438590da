"""From an address that all know to a transport whose view stands: rendezvous, control connections, payload links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco.errors import RendezvousError, TransportError
from diloco.membership.quorum import Policy
from diloco.membership.view import View
from diloco.transport.address import Address, local_host_towards, parse_address, parse_ports
from diloco.transport.links import Link
from diloco.transport.peers.registry import Entry, Registry
from diloco.transport.peers.rounds import Rules
from diloco.transport.peers.switchboard import Switchboard, Timing
from diloco.transport.peers.transport import PeerTransport
from diloco.transport.peers.views import Policies
from diloco.transport.torch_distributed.data_link import link_opener, make_device
from diloco.transport.torch_distributed.doctor import serve_probes
from diloco.transport.torch_distributed.rendezvous import Table, ask, exchange_word, serve
from diloco.transport.torch_distributed.tcp_streams import TcpStreams

__all__ = ["Connected", "Place", "Wire", "connect", "join"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this is, and where the others are asked for.

    Attributes:
        replica: m.
        num_replicas: M.
        position: of this rank inside its replica.
        ranks_per_replica: S.
        rendezvous: an address that all ranks are given: of rank 0, which listens there unless somebody else does, of a
            launcher, or of any replica of a run that is going on.
        torchrun: instead of ``rendezvous``: the address of ``torchrun``'s own store, through which rank 0 tells its.
        attempt: of ``torchrun``, which restarts a group of workers together.
    """

    replica: int
    num_replicas: int
    position: int = 0
    ranks_per_replica: int = 1
    rendezvous: Address | None = None
    torchrun: Address | None = None
    attempt: str = "0"

    @property
    def rank(self) -> int:
        return self.replica * self.ranks_per_replica + self.position


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How ranks are connected.

    Attributes:
        host: address of this machine to listen at; "": the one that the way to the rendezvous begins at.
        ports: of the control connection: ``0`` for any, ``FIRST`` or ``FIRST-LAST``.
        interface: network interface of the payload connections; "": that of ``host``.
        streams: payload connections to each peer; 0: about four in all.
        piece_bytes: about how large a piece of a payload is.
        heartbeat_s, silence_s: see `Timing`.
        round_timeout_s: from a rank's contribution to its vote.
        rendezvous_timeout_s: for all to find and connect each other.
        min_contributors: a round with fewer is void; None: all.
        min_replicas: fewer never go on.
        go_on: whether survivors form a smaller view.
        raise_on_loss: see `Policies`.
        link: emulated at this end, or None.
        facts: what must be the same on all ranks, name -> value in words.
    """

    host: str = ""
    ports: str = "0"
    interface: str = ""
    streams: int = 0
    piece_bytes: int = 1 << 19
    heartbeat_s: float = 2.0
    silence_s: float = 15.0
    round_timeout_s: float = 600.0
    rendezvous_timeout_s: float = 300.0
    min_contributors: int | None = None
    min_replicas: int = 1
    go_on: bool = False
    raise_on_loss: bool = True
    link: Link | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Connected:
    """A transport that stands.

    Attributes:
        transport: ready for rounds, or, for a joiner, for `fetch` and then `join`.
        table: everybody's entries.
        joining: whether the run was going on already.
    """

    transport: PeerTransport
    table: Table
    joining: bool

    def already_running(self) -> RendezvousError:
        """For who came to begin a run, and finds one that is going on."""
        return RendezvousError(
            f"replica {self.transport.replica} came to begin a run, and the others are in the middle of one; another "
            "rendezvous, or joining them, would work. Nothing was started."
        )


def connect(place: Place, wire: Wire, *, held_step: int = -1) -> Connected:
    """Find the others and connect to all of them.

    Args:
        place: which rank this is.
        wire: how.
        held_step: the newest step that this rank could resume from; told to the others.

    Raises:
        RendezvousError: if that does not succeed in time, or the ranks do not fit together; nothing stays open.
        TransportError: if this machine can't listen where it should.
    """
    rules = Rules(
        rank=place.rank,
        replica=place.replica,
        ranks_per_replica=place.ranks_per_replica,
        min_contributors=wire.min_contributors,
        round_timeout_s=wire.round_timeout_s,
        piece_bytes=wire.piece_bytes,
    )
    others = place.num_replicas - 1
    policies = Policies(
        quorum=Policy(wire.min_replicas),
        go_on=wire.go_on,
        raise_on_loss=wire.raise_on_loss,
        streams=wire.streams or max(1, round(4 / max(1, others))),
        connect_timeout_s=min(wire.rendezvous_timeout_s, max(10.0, 4 * wire.silence_s)),
    )
    transport = PeerTransport(rules, policies, Timing(wire.heartbeat_s, wire.silence_s), TcpStreams(), wire.link)
    serve_probes(transport.board)
    try:
        return _connect(transport, place, wire, held_step)
    except BaseException:
        transport.close()
        raise


def _connect(transport: PeerTransport, place: Place, wire: Wire, held_step: int) -> Connected:
    board, size = transport.board, place.ranks_per_replica
    host = wire.host or _my_host(place)
    ports = parse_ports(wire.ports, key="transport.ports")
    hosting = place.torchrun is not None and place.rank == 0
    if place.rank == 0 and place.rendezvous is not None:
        hosting = _host_rendezvous(board, place.rendezvous, host)
    if board.address.port == 0:
        board.listen(host, ports, host)
    if hosting:
        serve(board, Registry(place.num_replicas * size, size))
    meeting = board.address if hosting else place.rendezvous
    if place.torchrun is not None:
        mine = str(board.address) if place.rank == 0 else None
        word = exchange_word(place.torchrun, mine, wire.rendezvous_timeout_s, f"address (attempt {place.attempt})")
        meeting = parse_address(word, key="the address of rank 0")
    if meeting is None:
        raise RendezvousError(
            f"replica {place.replica} was given no rendezvous; --rendezvous HOST:PORT of replica 0, or of any replica "
            "of a run that is going on, would work. Nothing was started."
        )
    entry = Entry(place.rank, str(board.address), wire.facts, held_step)
    table = ask(board, meeting, entry, wire.rendezvous_timeout_s)
    open_link = link_opener(make_device(host, wire.interface), transport.mailbox)
    registry = Registry(len(table.entries), size, list(table.entries.values()))
    reached = board.call(_dial(board, table, place, wire.rendezvous_timeout_s))
    if table.running:
        if not reached:
            raise RendezvousError(
                f"the run that {meeting} knows of is over: none of its replicas answers. Starting all of them again "
                "would work. Nothing was started."
            )
        members = tuple(sorted({rank // size for rank in reached}))
        serve(board, registry)
        transport.begin(View(-1, members), registry, open_link, member=False)
    else:
        board.call(_arrived(board, place, wire.rendezvous_timeout_s, table))
        serve(board, registry)
        transport.begin(View.of(place.num_replicas), registry, open_link, member=True)
    return Connected(transport, table, table.running)


def join(connected: Connected, timeout_s: float) -> int:
    """Become a member of the run that is going on.

    Returns:
        The inner steps that are done: the joiner's own first step is the one after.

    Raises:
        RendezvousError: if the members refuse, or do not answer in time.
    """
    transport, entry = connected.transport, connected.table.entries[connected.transport.rules.rank]
    deadline_s = time.monotonic() + timeout_s
    transport.ask_to_join(entry)
    while (answer := transport.welcome(deadline_s - time.monotonic())) is None or answer["kind"] == "refused":
        if answer is None or answer["for_good"] or time.monotonic() > deadline_s:
            why = f"they refuse: {answer['reason']}" if answer else f"no answer within {timeout_s:g} s"
            raise RendezvousError(f"replica {transport.replica} can't join the others: {why}. It stops here.")
        time.sleep(1.0)  # they are not ready for it yet
        transport.ask_to_join(entry)
    transport.enter(answer)
    return transport.step


async def _dial(board: Switchboard, table: Table, place: Place, timeout_s: float) -> set[int]:
    """Open connections: to all lower ranks at the start, to all others that answer for a joiner; the ranks reached."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    size = place.ranks_per_replica
    reached: set[int] = set()

    async def one(rank: int) -> None:
        address = parse_address(table.entries[rank].address)
        why = ""
        while (left_s := deadline_s - loop.time()) > 0:
            try:
                await asyncio.wait_for(board.connect(rank, address), left_s)
                reached.add(rank)
                return
            except ConnectionRefusedError as error:
                why = str(error)
                if table.running:
                    return  # it has ended; the others know
            except (OSError, EOFError, TransportError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            await asyncio.sleep(0.2)
        raise RendezvousError(
            f"rank {place.rank} can't reach rank {rank} at {address} within {timeout_s:g} s: {why}. An open port, or "
            "another transport.host or transport.ports there, would work; `diloco doctor` checks the way. "
            "Nothing was started.",
            replicas=[rank // size],
        )

    # ranks of one replica that joins connect to each other as all ranks do at the start
    mine = range(place.replica * size, (place.replica + 1) * size)
    lower = [rank for rank in table.entries if rank < place.rank]
    others = [rank for rank in table.entries if rank not in mine or rank < place.rank]
    await asyncio.gather(*(one(rank) for rank in (others if table.running else lower)))
    return reached - set(mine)


async def _arrived(board: Switchboard, place: Place, timeout_s: float, table: Table) -> None:
    """Wait for the connections that higher ranks open."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    wanted = {rank for rank in table.entries if rank != place.rank}
    while missing := wanted - board.connected:
        board.arrived.clear()
        try:
            await asyncio.wait_for(board.arrived.wait(), deadline_s - loop.time())
        except TimeoutError:
            named = ", ".join(f"{rank} ({table.entries[rank].address})" for rank in sorted(missing))
            raise RendezvousError(
                f"rank {place.rank} at {board.address} was not reached by rank {named} within {timeout_s:g} s. "
                "Opening that port would work; `diloco doctor` checks the way. Nothing was started."
            ) from None


def _host_rendezvous(board: Switchboard, address: Address, host: str) -> bool:
    """Listen at the rendezvous as rank 0 does, unless it is elsewhere: a launcher's, or another replica's."""
    try:
        board.listen(address.host, range(address.port, address.port + 1), host)
    except TransportError:
        return False
    return True


def _my_host(place: Place) -> str:
    towards = place.rendezvous or place.torchrun
    if towards is None:
        return "127.0.0.1"
    try:
        return local_host_towards(towards)
    except OSError as error:
        raise RendezvousError(
            f"{towards.host!r} was given as the rendezvous, and there is no way to it: {error}. A name that resolves, "
            "or an address, would work. Nothing was started."
        ) from error
