"""An emulated WAN, made by a script that is given."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.wan.counters import DEVICE, interface_bytes
from benchmarks.wan.plan import Link
from diloco.errors import ConfigurationError

__all__ = ["Loopback", "Network"]


class Network:
    """Network namespaces joined by emulated links; node i has the address 10.77.0.(i+1) on wan0.

    The script must know ``up N rate=..mbit rtt=..ms [loss=..%] [cc=..] [segs=mtu]``, ``set all up=..mbit``, ``exec I
    COMMAND...`` (in the place of the script's own process), and ``down``, and keep networks of different ``WAN_PREFIX``
    apart.

    Args:
        script: the script.
        prefix: ``WAN_PREFIX``, so that a network of somebody else's is left alone.

    Attributes:
        device: the interface by which the nodes reach each other.
    """

    device = DEVICE

    def __init__(self, script: Path, prefix: str) -> None:
        if not os.access(script, os.X_OK):
            raise ConfigurationError(
                f"--wan {script} was given, which is no executable file; a script that makes network namespaces joined "
                "by emulated links (see README.md) would work. Nothing was started."
            )
        self.script = script
        self.environment = os.environ | {"WAN_PREFIX": prefix}

    @contextmanager
    def up(self, link: Link) -> Iterator[None]:
        """Inside, ``link.replicas`` nodes are joined by ``link``.

        Raises:
            ConfigurationError: if the script fails (it carries the script's message), or the nodes do not have the
                congestion control asked for.
        """
        try:
            self._do("up", *link.arguments())
            if link.up_bits_per_s:
                self._do("set", "all", f"up={link.up_bits_per_s / 1e6:g}mbit")
            self._check_congestion_control(link)
            yield
        finally:
            self._do("down")

    def address(self, node: int) -> str:
        """IPv4 address of ``node``, from 0."""
        return f"10.77.0.{node + 1}"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """What runs ``arguments`` inside ``node``."""
        return [str(self.script), "exec", str(node), *arguments]

    def sent_bytes(self, node: int) -> int:
        """What has left ``node`` since the network is up, headers included."""
        command = self.command(node, ["cat", "/proc/net/dev"])
        shown = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout
        return interface_bytes(shown)[1]

    def _check_congestion_control(self, link: Link) -> None:
        """A kernel may refuse: inside a namespace only allowed ones can be chosen."""
        file = "/proc/sys/net/ipv4/tcp_congestion_control"
        command = self.command(0, ["cat", file])
        has = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout.strip()
        if link.congestion_control not in ("", has):
            raise ConfigurationError(
                f"{link.name}: {link.congestion_control} was asked for and the nodes have {has}; adding it to "
                "net.ipv4.tcp_allowed_congestion_control of the machine would work. The benchmark stops here; finished "
                "runs are kept."
            )

    def _do(self, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.script), *arguments], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigurationError(
                f"{self.script} {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr} "
                "It may need root. The benchmark stops here; finished runs are kept."
            )


class Loopback(Network):
    """The loopback interface instead of an emulated network: all nodes share this machine's address 127.0.0.1."""

    device = "lo"

    def __init__(self) -> None:
        self.environment = dict(os.environ)

    @contextmanager
    def up(self, link: Link) -> Iterator[None]:
        yield

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        return list(arguments)

    def sent_bytes(self, node: int) -> int:
        """Return 0: the nodes share the interface, so its counters can't tell them apart."""
        return 0
