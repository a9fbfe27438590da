"""``diloco doctor``: check the connection to each peer and measure its latency and bandwidth."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.cli.tables import columns
from diloco.config import command_text, parse_options
from diloco.errors import ConfigurationError
from diloco.train import StopRequest
from diloco.transport import parse_address, read_secret
from diloco.units import BYTES, Duration, format_rate, parse

_POLL_S = 0.2

DESCRIPTION = """Check the connection to other replicas: name resolution, ports, latency and bandwidth.

Examples:
  diloco doctor 10.0.0.1:29400 10.0.0.2:29400
  diloco doctor --listen 10.0.0.1:29400"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `diloco doctor`."""

    peers: Positional[Annotated[tuple[str, ...], arg(metavar="HOST:PORT...", help_behavior_hint="")]] = ()
    """Control addresses of replicas (each prints its own when it starts) or of machines that run `doctor --listen`."""
    listen: Annotated[str | None, arg(metavar="HOST:PORT", help_behavior_hint="")] = None
    """Answer probes at this HOST:PORT until interrupted, on a machine where no replica is running yet."""
    size: Annotated[str, arg(metavar="SIZE")] = "10MB"
    """How much to transfer in each direction, 100kB to 64MB."""
    timeout: Annotated[Duration, arg(metavar="TIME", help_behavior_hint="")] = 10.0
    """How long each step of the check may take. Default: 10s."""
    secret_file: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """The run's secret (network.secret_file), if it has one; both ends need it."""
    json: Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """Print the findings as JSON."""


def run(arguments: Sequence[str]) -> int:
    """Check the peers, or listen; return 0 if every connection works, otherwise 1."""
    options = parse_options(DoctorOptions, "doctor", DESCRIPTION, arguments)
    if bool(options.peers) == bool(options.listen):
        raise ConfigurationError(
            "give either the HOST:PORT of each peer to check, such as `diloco doctor 10.0.0.1:29400`, or --listen "
            "HOST:PORT."
        )
    num_bytes = round(parse(options.size, "--size", BYTES))
    if not 100_000 <= num_bytes <= 64_000_000:
        raise ConfigurationError(f"--size must be between 100kB and 64MB, got {options.size}.")
    if not options.timeout:
        raise ConfigurationError("--timeout must be above 0s.")
    secret = read_secret(options.secret_file, "--secret-file")
    return _listen(options.listen, secret) if options.listen else _examine(options, num_bytes, secret)


def _examine(options: DoctorOptions, num_bytes: int, secret: str) -> int:
    from diloco.transport import examine

    addresses = [parse_address(peer, key="the peer") for peer in options.peers]
    # one at a time: concurrent checks would share this machine's link
    findings = [asyncio.run(examine(address, num_bytes, options.timeout, secret)) for address in addresses]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = []
        for each in findings:
            status, latency_s = "ok" if each.ok else "FAILED", each.latency_s
            rates = ["-" if rate is None else format_rate(rate) for rate in (each.up_bits_per_s, each.down_bits_per_s)]
            latency = "-" if latency_s is None else f"{1000 * latency_s:.1f} ms"
            rows.append([each.address, ", ".join(each.resolved) or "-", status, latency, *rates])
        print(columns(["peer", "address", "status", "round trip", "to peer", "from peer"], rows))
    for each in findings:
        if not each.ok:
            print(f"diloco: {each.address}: {each.problem}; {each.advice}.", file=sys.stderr)
    return 0 if all(each.ok for each in findings) else 1


def _listen(text: str, secret: str) -> int:
    from diloco.protocol import Timing
    from diloco.transport import ConnectionManager, TcpStreams, serve_probes

    address = parse_address(text, key="--listen")
    connections = ConnectionManager(-1, Timing(), TcpStreams(secret=secret))
    try:
        bound = connections.listen(address.host, range(address.port, address.port + 1), address.host)
        serve_probes(connections)
        with StopRequest() as asked:
            print(
                f"listening at {bound}. Run `{command_text('doctor', bound)}` on another machine to check its "
                "connection to this one. Ctrl-C stops.",
                flush=True,
            )
            while asked.signal is None:
                time.sleep(_POLL_S)
    finally:
        connections.close()
    return 0
