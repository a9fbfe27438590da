"""An emulated WAN, made by the user's script, and the loopback interface in its place."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.wan.counters import DEVICE, interface_bytes
from benchmarks.wan.plan import Link
from diloco.errors import ConfigurationError


class Network:
    """Network namespaces joined by emulated links; node i has the address 10.77.0.(i+1) on wan0.

    The script must support ``up N rate=..mbit rtt=..ms [loss=..%] [cc=..] [segs=mtu]``, ``set I up=..mbit`` (I: a node)
    and ``set all jitter=..ms``, ``exec I COMMAND...`` (which replaces the script's own process) and ``down``. It must
    keep networks with different ``WAN_PREFIX`` apart.

    Args:
        script: the path of the script.
        prefix: ``WAN_PREFIX``; the networks of other users have another prefix.

    Attributes:
        device: the interface through which the nodes reach each other.

    Raises:
        ConfigurationError: if the script is not executable.
    """

    device = DEVICE

    def __init__(self, script: Path, prefix: str) -> None:
        if not os.access(script, os.X_OK):
            raise ConfigurationError(
                f"--wan {script} is not an executable file. Give a script that makes network namespaces joined by "
                "emulated links; benchmarks/wan/README.md says what it must support. Nothing was started."
            )
        self.script = script
        self.environment = os.environ | {"WAN_PREFIX": prefix}

    @contextmanager
    def up(self, link: Link) -> Iterator[None]:
        """Join ``link.replicas`` nodes by ``link`` inside the context.

        Raises:
            ConfigurationError: if the script fails (with the script's output), or the nodes don't use the requested
                congestion control.
        """
        try:
            self._do("up", *link.arguments())
            for node, rate in enumerate(link.up_bits_per_s):
                self._do("set", str(node), f"up={rate / 1e6:g}mbit")
            if link.jitter_s:
                self._do("set", "all", f"jitter={1e3 * link.jitter_s:g}ms")
            self._check_congestion_control(link)
            yield
        finally:
            self._do("down")

    def address(self, node: int) -> str:
        """Return the IPv4 address of ``node``, counted from 0."""
        return f"10.77.0.{node + 1}"

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs ``arguments`` inside ``node``."""
        return [str(self.script), "exec", str(node), *arguments]

    def sent_bytes(self, node: int) -> int:
        """Return the bytes that ``node`` has sent since the network was made, headers included."""
        command = self.command(node, ["cat", "/proc/net/dev"])
        shown = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout
        return interface_bytes(shown)[1]

    def _check_congestion_control(self, link: Link) -> None:
        """Raise if the kernel refused the congestion control: a namespace can choose only among the allowed ones."""
        file = "/proc/sys/net/ipv4/tcp_congestion_control"
        command = self.command(0, ["cat", file])
        has = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout.strip()
        if link.congestion_control not in ("", has):
            raise ConfigurationError(
                f"The link {link.name!r} needs {link.congestion_control}, but the nodes use {has}. Add "
                f"{link.congestion_control} to this machine's net.ipv4.tcp_allowed_congestion_control. The benchmark "
                "stops here; finished runs are kept."
            )

    def _do(self, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.script), *arguments], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigurationError(
                f"{self.script} {' '.join(arguments)} failed with exit code {done.returncode}: "
                f"{done.stdout}{done.stderr} It may need root. The benchmark stops here; finished runs are kept."
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
