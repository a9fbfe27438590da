"""``diloco doctor``: check the connection to each peer and measure its latency and bandwidth."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from diloco.cli.tables import columns
from diloco.config import command_text, parse_options
from diloco.errors import ConfigurationError
from diloco.train import StopRequest
from diloco.transport import parse_address, read_secret
from diloco.units import Duration, format_rate, parse_bytes

__all__ = ["run"]

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
    num_bytes = parse_bytes(options.size, "--size")
    if not 100_000 <= num_bytes <= 64_000_000:
        raise ConfigurationError(f"--size must be between 100kB and 64MB, got {options.size}.")
    if not options.timeout:
        raise ConfigurationError("--timeout must be above 0s.")
    return _listen(options.listen, options.secret_file) if options.listen else _examine(options, num_bytes)


def _examine(options: DoctorOptions, num_bytes: int) -> int:
    from diloco.transport import examine

    addresses = [parse_address(peer, key="the peer") for peer in options.peers]
    secret = read_secret(options.secret_file, "--secret-file")
    # one at a time: concurrent checks would share this machine's link
    findings = [asyncio.run(examine(address, num_bytes, options.timeout, secret)) for address in addresses]
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        rows = [
            [
                finding.address,
                ", ".join(finding.resolved) or "-",
                "ok" if finding.ok else "FAILED",
                "-" if finding.latency_s is None else f"{1000 * finding.latency_s:.1f} ms",
                *(
                    "-" if rate is None else format_rate(rate)
                    for rate in (finding.up_bits_per_s, finding.down_bits_per_s)
                ),
            ]
            for finding in findings
        ]
        print(columns(["peer", "address", "status", "round trip", "to peer", "from peer"], rows))
    for finding in findings:
        if not finding.ok:
            print(f"diloco: {finding.address}: {finding.problem}; {finding.advice}.", file=sys.stderr)
    return 0 if all(finding.ok for finding in findings) else 1


def _listen(text: str, secret_file: Path | None) -> int:
    from diloco.protocol import Timing
    from diloco.transport import ConnectionManager, TcpStreams, serve_probes

    secret = read_secret(secret_file, "--secret-file")
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
