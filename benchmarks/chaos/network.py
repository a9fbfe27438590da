"""Where the peers are: on this machine's loopback, or in network namespaces that a script makes."""

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
    """All on 127.0.0.1; nobody can be cut off."""

    can_cut = False

    @contextmanager
    def up(self, nodes: int) -> Iterator[None]:
        """Nothing to do."""
        yield

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return "127.0.0.1"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """What runs ``arguments`` in a node."""
        return list(arguments)

    def free_port(self) -> int:
        """A port that nobody uses for now."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return int(found.getsockname()[1])

    def cut(self, node: int) -> None:
        """Not here."""
        raise NotImplementedError("peers on loopback can't be cut off; --wan SCRIPT makes a network where they can")

    heal = cut

    def silence(self, source: int, target: int) -> None:
        """Not here either."""
        raise NotImplementedError("peers on loopback always hear each other; --wan SCRIPT makes a network for that")

    hear = silence


class Wan(Loopback):
    """Network namespaces joined by emulated links; node i has the address 10.77.0.(i+1).

    The script must know ``up N rate=..mbit rtt=..ms``, ``exec I COMMAND...`` (in the place of the script's own
    process), ``set I dead=0|1`` and ``down``, and keep networks of different ``WAN_PREFIX`` apart.

    Args:
        script: the script.
        prefix: ``WAN_PREFIX``.
        link: the links' rate and round trip, in the script's words.
    """

    can_cut = True

    def __init__(self, script: Path, prefix: str, link: Sequence[str] = ("rate=100mbit", "rtt=40ms")) -> None:
        if not os.access(script, os.X_OK):
            raise ConfigurationError(
                f"--wan {script} was given, which is no executable file; a script that makes network namespaces joined "
                "by emulated links (see README.md) would work. Nothing was started."
            )
        self._script = script
        self._environment = os.environ | {"WAN_PREFIX": prefix}
        self._link = tuple(link)

    @contextmanager
    def up(self, nodes: int) -> Iterator[None]:
        """Inside, there are ``nodes`` nodes."""
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
        """No packet gets to a node or from it, from now on."""
        self._do("set", str(node), "dead=1")

    def heal(self, node: int) -> None:
        """A node is reached again."""
        self._do("set", str(node), "dead=0")

    def silence(self, source: int, target: int) -> None:
        """No packet gets from ``source`` to ``target``, from now on; those the other way do."""
        self._do("exec", str(source), "ip", "route", "add", "blackhole", f"{self.address(target)}/32")

    def hear(self, source: int, target: int) -> None:
        """Packets get through again."""
        self._do("exec", str(source), "ip", "route", "del", "blackhole", f"{self.address(target)}/32")

    def _do(self, *arguments: str) -> None:
        command = [str(self._script), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigurationError(
                f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr} It may need root."
            )
