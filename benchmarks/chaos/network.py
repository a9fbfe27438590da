"""The networks of the peers: this machine's loopback, or network namespaces that a script makes."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diloco.errors import ConfigurationError

__all__ = ["Loopback", "Wan"]


class Loopback:
    """All peers are on 127.0.0.1, and links can't be cut."""

    can_cut = False

    @contextmanager
    def up(self, nodes: int) -> Iterator[None]:
        """Do nothing."""
        yield

    def address(self, node: int) -> str:
        """Return the IPv4 address of a node."""
        return "127.0.0.1"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs ``arguments`` in a node."""
        return list(arguments)

    def free_port(self) -> int:
        """Return a port that is free at present."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return int(found.getsockname()[1])

    def cut(self, node: int) -> None:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("Peers on loopback can't be cut off. Use a network made by --wan SCRIPT.")

    heal = cut

    def silence(self, source: int, target: int) -> None:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("Links on loopback can't be cut. Use a network made by --wan SCRIPT.")

    hear = silence


class Wan(Loopback):
    """Network namespaces joined by emulated links; node i has the address 10.77.0.(i+1).

    The script must support ``up N rate=..mbit rtt=..ms``, ``exec I COMMAND...`` (which replaces the script's own
    process), ``set I dead=0|1`` and ``down``, and keep networks of different ``WAN_PREFIX`` apart.

    Args:
        script: the script.
        prefix: ``WAN_PREFIX``.
        link: rate and round-trip time of the links, as arguments of the script.
    """

    can_cut = True

    def __init__(self, script: Path, prefix: str, link: Sequence[str] = ("rate=100mbit", "rtt=40ms")) -> None:
        if not os.access(script, os.X_OK):
            raise ConfigurationError(
                f"--wan needs an executable script that makes network namespaces and links, got {script}. README.md "
                "says what the script must do. Nothing was started."
            )
        self._script = script
        self._environment = os.environ | {"WAN_PREFIX": prefix}
        self._link = tuple(link)

    @contextmanager
    def up(self, nodes: int) -> Iterator[None]:
        """Provide ``nodes`` nodes inside the context."""
        try:
            self._do("up", str(nodes), *self._link)
            yield
        finally:
            self._do("down")

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        prefix = f"WAN_PREFIX={self._environment['WAN_PREFIX']}"
        return ["env", prefix, str(self._script), "exec", str(node), *arguments]

    def free_port(self) -> int:
        return 31330

    def cut(self, node: int) -> None:
        """Drop all packets to and from a node from now on."""
        self._do("set", str(node), "dead=1")

    def heal(self, node: int) -> None:
        """Let packets reach and leave a node again."""
        self._do("set", str(node), "dead=0")

    def silence(self, source: int, target: int) -> None:
        """Drop packets from ``source`` to ``target`` from now on, but not those in the other direction."""
        self._do("exec", str(source), "ip", "route", "add", "blackhole", f"{self.address(target)}/32")

    def hear(self, source: int, target: int) -> None:
        """Let packets from ``source`` to ``target`` through again."""
        self._do("exec", str(source), "ip", "route", "del", "blackhole", f"{self.address(target)}/32")

    def _do(self, *arguments: str) -> None:
        command = [str(self._script), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigurationError(
                f"{' '.join(command)} ended with exit code {done.returncode}: {done.stdout}{done.stderr} "
                "It may need root."
            )
