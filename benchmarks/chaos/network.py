"""The networks of the peers: this machine's loopback, or network namespaces whose links can be cut."""

import os
import socket
from pathlib import Path

from benchmarks.wan import network as wan
from benchmarks.wan.plan import Link


def link(nodes: int) -> Link:
    """Return the link of each of so many nodes."""
    return Link("chaos", nodes, 100e6, 0.04)


class Loopback(wan.Loopback):
    """All peers are on 127.0.0.1, and links can't be cut."""

    can_cut = False

    def free_port(self) -> int:
        """Return a port that is free at present."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])


class Wan(wan.Network):
    """Network namespaces joined by emulated links. The script must also support ``set I dead=0|1``."""

    can_cut = True

    def __init__(self, script: Path, prefix: str) -> None:
        super().__init__(script, prefix)
        os.environ["WAN_PREFIX"] = prefix  # for the commands that run in a node

    def free_port(self) -> int:
        return 31330

    def do(self, verb: str, one: int, other: int = 0) -> None:
        """Change links.

        Args:
            verb: "off" or "on": drop all packets to and from node ``one``, or let them pass again; "silence" or "hear":
                the same for packets from node ``one`` to node ``other`` alone; "refuse" or "admit": node ``other``
                resets all connections from node ``one``, as if nothing listened there, or does so no more.
        """
        if verb in ("off", "on"):
            self._do("set", str(one), f"dead={int(verb == 'off')}")
        elif verb in ("refuse", "admit"):
            change, source = "-I" if verb == "refuse" else "-D", self.address(one)
            rule = f"{change} INPUT --source {source} --protocol tcp --jump REJECT --reject-with tcp-reset"
            self._do("exec", str(other), "iptables", *rule.split())
        else:
            change = "add" if verb == "silence" else "del"
            self._do("exec", str(one), "ip", "route", change, "blackhole", f"{self.address(other)}/32")
