"""``diloco doctor``, ``diloco relay`` and ``diloco secret``: what a run needs of the network, without training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from diloco.config import command_text, parse_options
from diloco.errors import ConfigurationError
from diloco.train import StopRequest
from diloco.transport import multiaddress, parse_address, read_secret
from diloco.units import BYTES, Duration, columns, format_rate, parse
from diloco.waiting import say


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
    timeout: Duration = 10.0
    """How long each step of the check may take. Default: 10s."""
    secret_file: Path | None = None
    """The run's secret (network.secret_file), if it has one; both ends need it."""
    json: bool = False
    """Print the findings as JSON."""


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

    addresses = [parse_address(peer, key="the peer") for peer in options.peers]
    # one at a time: concurrent checks would share this machine's link
    findings = [asyncio.run(examine(address, num_bytes, options.timeout, secret)) for address in addresses]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = []
        for each in findings:
            rates = ["-" if rate is None else format_rate(rate) for rate in (each.up_bits_per_s, each.down_bits_per_s)]
            latency = "-" if each.latency_s is None else f"{1000 * each.latency_s:.1f} ms"
            status = "ok" if each.ok else "FAILED"
            rows.append([each.address, ", ".join(each.resolved) or "-", status, latency, *rates])
        print(columns(["peer", "address", "status", "round trip", "to peer", "from peer"], rows))
    problems = [f"{each.address}: {each.problem}; {each.advice}." for each in findings if not each.ok]
    for words in problems:
        say(words, "error")
    return 1 if problems else 0


def _listen(text: str, secret: str) -> int:
    from diloco.protocol import Rules
    from diloco.transport import ConnectionManager, TcpStreams, serve_probes

    address = parse_address(text, key="--listen")
    connections = ConnectionManager(Rules(rank=-1), TcpStreams(secret))
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
            print(f"  --join {address}", flush=True)

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
class SecretOptions:
    """Write a new random secret into a file that only you can read. Every machine of a run needs a copy.

    Examples:
      diloco secret run.secret
    """

    file: Positional[Path]
    """The file to create. An existing one is left as it is."""


def run_secret(arguments: Sequence[str]) -> int:
    """Create the file; return 0."""
    from diloco.private_files import create_private
    from diloco.transport import new_secret

    path = parse_options(SecretOptions, "secret", arguments).file
    try:
        create_private(path, f"{new_secret()}\n".encode())
    except FileExistsError as error:
        raise ConfigurationError(f"{path} exists. Choose another name, or remove it first.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error}.") from error
    print(f"diloco: wrote a new secret to {path}. Copy it to every machine of the run (scp -p) for --secret-file.")
    return 0
