"""Addresses of control ports, and how names resolve."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from diloco.errors import ConfigurationError

__all__ = ["Address", "local_host_towards", "parse_address", "parse_ports"]


@dataclass(frozen=True)
class Address:
    """Where a process listens.

    >>> str(Address("::1", 29400))
    '[::1]:29400'
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, key: str = "the address") -> Address:
    """``HOST:PORT``, IPv6 in brackets.

    Raises:
        ConfigurationError: for anything else; it names ``key``, the option.

    >>> parse_address("[fe80::1]:29400")
    Address(host='fe80::1', port=29400)
    """
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not bare or not _is_number(port) or int(port) > 65535 or (":" in bare and not bracketed):
        raise ConfigurationError(
            f"{key}={text!r} was given. Use HOST:PORT, such as 10.0.0.1:29400 or [fe80::1]:29400. Nothing was started."
        )
    return Address(bare, int(port))


def parse_ports(text: str, *, key: str = "ports") -> range:
    """``PORT``, ``FIRST-LAST``, or ``0`` for any free one.

    Raises:
        ConfigurationError: for anything else.

    >>> parse_ports("29400-29402")
    range(29400, 29403)
    """
    first, dash, last = text.partition("-")
    if _is_number(first) and (not dash or _is_number(last)):
        low, high = int(first), int(last or first)
        if low <= high <= 65535 and (low > 0 or not dash):
            return range(low, high + 1)
    raise ConfigurationError(
        f"{key}={text!r} was given. Use a port such as 29400, a range such as 29400-29431, or 0 for any free port. "
        "Nothing was started."
    )


def local_host_towards(remote: Address) -> str:
    """The address of this machine from which ``remote`` is reached.

    Nothing is sent: connecting a datagram socket only looks up the route.

    Raises:
        OSError: if the name does not resolve or there is no route.
    """
    found = socket.getaddrinfo(remote.host, remote.port or 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0]).partition("%")[0]


def _is_number(text: str) -> bool:
    """Only ASCII digits: `int` reads more than that."""
    return text.isascii() and text.isdigit()
