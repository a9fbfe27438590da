"""``diloco doctor``, ``diloco relay`` and ``diloco secret``: what a run needs of the network, without training."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta
from tyro.conf import Positional, arg

from diloco.cli.status import SwarmOptions
from diloco.config import command_text, parse_options
from diloco.errors import ConfigurationError
from diloco.signals import StopRequest
from diloco.transport import multiaddress, parse_address, read_secret
from diloco.units import BYTES, Duration, columns, format_rate, parse
from diloco.waiting import say

if TYPE_CHECKING:
    from diloco.transport import Identity


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check the connection to other replicas: name resolution, ports, latency and bandwidth.

    Examples:
      diloco doctor 10.0.0.1:29400 10.0.0.2:29400
      diloco doctor --listen 10.0.0.1:29400
    """

    peers: Positional[Annotated[tuple[str, ...], arg(metavar="HOST:PORT...")]] = ()
    """Control addresses of replicas (each prints its own when it starts) or of machines that run `doctor --listen`."""
    listen: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Answer probes at this HOST:PORT until interrupted, on a machine where no replica is running yet."""
    size: Annotated[str, arg(metavar="SIZE")] = "10MB"
    """How much to transfer in each direction, 100kB to 64MB."""
    timeout: Annotated[Duration, Meta(gt=0)] = 10.0
    """How long each step of the check may take. Default: 10s."""
    secret_file: Path | None = None
    """The run's secret (network.secret_file), if it has one; both ends need it."""


def run_doctor(arguments: Sequence[str]) -> int:
    """Check the peers, or listen; return 0 if every connection works, otherwise 1."""
    options = parse_options(DoctorOptions, "doctor", arguments)
    if bool(options.peers) == bool(options.listen):
        raise ConfigurationError(
            "give either the HOST:PORT of each peer to check, such as `diloco doctor 10.0.0.1:29400`, or --listen "
            "HOST:PORT."
        )
    num_bytes = round(parse(options.size, "--size", BYTES))
    if not 100_000 <= num_bytes <= 64_000_000:
        raise ConfigurationError(f"--size must be between 100kB and 64MB, got {options.size}.")
    secret = read_secret(options.secret_file, "--secret-file")
    if options.listen:
        return _listen(options.listen, secret)
    from diloco.transport import examine

    addresses = {peer: parse_address(peer, key="the peer") for peer in options.peers}
    # one at a time: concurrent checks would share this machine's link
    findings = {
        peer: asyncio.run(examine(address, num_bytes, options.timeout, secret)) for peer, address in addresses.items()
    }
    rows, failed = [], {peer: finding.problem for peer, finding in findings.items() if finding.problem}
    for peer, finding in findings.items():
        rates = format_rate(finding.up_bits_per_s), format_rate(finding.down_bits_per_s)
        figures = ("FAILED", "-", "-", "-") if finding.problem else ("ok", f"{1000 * finding.latency_s:.1f} ms", *rates)
        rows.append([peer, *figures])
    print(columns(["peer", "status", "round trip", "to peer", "from peer"], rows))
    for peer, problem in failed.items():
        say(f"{peer}: {problem}.", "error")
    return 1 if failed else 0


def _listen(text: str, secret: str) -> int:
    from diloco.protocol import Rules
    from diloco.transport import ConnectionManager, Credentials, TcpStreams, serve_probes

    address = parse_address(text, key="--listen")
    connections = ConnectionManager(Rules(rank=-1), TcpStreams(Credentials(secret=secret)))
    try:
        bound = connections.listen(address.host, range(address.port, address.port + 1), address.host)
        serve_probes(connections)
        with StopRequest() as asked:
            how = f"Run `{command_text('doctor', bound)}` on another machine to check its connection to this one."
            print(f"listening at {bound}. {how} Ctrl-C stops.", flush=True)
            while asked.signal is None:
                time.sleep(0.2)
    finally:
        connections.close()
    return 0


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """Run a bootstrap node, through which the peers of any run find each other. It trains nothing.

    Examples:
      diloco relay --listen 0.0.0.0:31330
      diloco relay --join /ip4/203.0.113.7/tcp/31330/p2p/QmXoyp...
    """

    listen: Annotated[str, arg(metavar="HOST:PORT")] = "0.0.0.0:0"
    """Address to listen at; port 0 is any free one."""
    announce: Annotated[tuple[str, ...], arg(metavar="HOST:PORT...")] = ()
    """Addresses to announce to other peers instead of --listen."""
    join: tuple[str, ...] = ()
    """Addresses of peers that are already running, if there are any."""
    identity: Path | None = None
    """Private key file, created if missing; it fixes the node's identity. Default: dht.key in your data folder."""


def run_relay(arguments: Sequence[str]) -> int:
    """Run the node until it is interrupted; return 0."""
    from diloco.transport import NodePlace, run_peer

    options: RelayOptions = parse_options(RelayOptions, "relay", arguments)

    def ready(addresses: tuple[str, ...]) -> None:
        print("diloco: peers of any run can find each other through this node with")
        for address in addresses:
            print(f"  --join {address}")
        print("and the first peer of each run adds --found", flush=True)

    announced = tuple(multiaddress(address, "--announce") for address in options.announce)
    place = NodePlace(
        join=options.join, listen=(multiaddress(options.listen, "--listen"),), announce=announced, public=True
    )
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")

    async def serve() -> None:
        serving = asyncio.ensure_future(run_peer(options.identity or home / "diloco" / "dht.key", place, ready))
        for ending in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(ending, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    asyncio.run(serve())
    print("diloco: stopped.", flush=True)
    return 0


@dataclass(frozen=True, kw_only=True)
class SecretOptions(SwarmOptions):
    """Write a new random secret into a file that only you can read. Every machine of a run needs a copy.

    With --eject, a running swarm changes to the new secret, and goes on without one of its peers.

    Examples:
      diloco secret run.secret
      diloco secret new.secret --eject QmPeer --founder runs/a --run my-run --join /ip4/203.0.113.7/tcp/31330/p2p/Qm...
    """

    file: Positional[Path]
    """The file to create. An existing one is left as it is."""
    eject: Annotated[str | None, arg(metavar="PEER")] = None
    """The peer to eject, as `diloco status` shows it. The members given with --join tell the others. The command shows
    all peers that the order ejects, and waits for a yes."""
    founder: Annotated[Path | None, arg(metavar="RUN")] = None
    """With --eject: run folder of the peer that has founded the swarm, whose key signs the order."""


def run_secret(arguments: Sequence[str]) -> int:
    """Create the file, and let a swarm use it; return 0."""
    from diloco.private_files import create_private
    from diloco.transport import load_identity, new_secret

    options: SecretOptions = parse_options(SecretOptions, "secret", arguments)
    path, peer, folder = options.file, options.eject, options.founder
    if not bool(peer) == bool(folder) == bool(options.run):
        raise ConfigurationError("--eject needs --founder, --run and --join, and these need --eject.")

    async def eject(peer: str, founder: Identity) -> bool:
        async with options.open_client(founder) as client:
            return await client.eject(peer, founder, path, _agrees)

    try:
        if peer and folder:
            if not (key := folder / "identity.key").exists():
                raise ConfigurationError(f"--founder {folder} has no identity.key. Give the founder's run folder.")
            if not asyncio.run(eject(peer, load_identity(key))):
                print("diloco: the answer was not yes. No order was given, and nothing was written.", file=sys.stderr)
                return 1
        else:
            create_private(path, f"{new_secret()}\n".encode())
    except FileExistsError as error:
        raise ConfigurationError(f"{path} exists. Choose another name, or remove it first.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error}.") from error
    use = "Copy it to every machine of the run (scp -p) for --secret-file."
    if peer:
        use = f"The members use it and no longer admit {peer}. Copy it (scp -p) to machines that join later."
    print(f"diloco: wrote a new secret to {path}. {use}")
    return 0


def _agrees(ejected: Sequence[str]) -> bool:
    """Show whom an order ejects, and return whether the answer on standard input is yes."""
    print(f"diloco: the order ejects {', '.join(ejected)}, and changes the secret of all others.", flush=True)
    print("Give it? [yes/no] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
