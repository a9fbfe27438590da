"""Addresses of control ports, and how names resolve."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass

from diloco.errors import ConfigurationError, TransportError

if sys.platform != "win32":
    import fcntl

__all__ = ["Address", "address_of_interface", "local_host_towards", "parse_address", "parse_ports"]

_INTERFACE_ADDRESS = {"linux": 0x8915, "darwin": 0xC0206921}
"""The request of ``ioctl`` by which the kernel tells it (SIOCGIFADDR)."""


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
        raise ConfigurationError(f"{key}={text!r} was given. Use HOST:PORT, such as 10.0.0.1:29400 or [fe80::1]:29400.")
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
        f"{key}={text!r} was given. Use a port such as 29400, a range such as 29400-29431, or 0 for any free port."
    )


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Raises:
        TransportError: if there is no such interface, or it has no such address.

    >>> address_of_interface("lo")
    '127.0.0.1'
    """
    why: str | None = f"{sys.platform} can't be asked"
    if sys.platform != "win32" and sys.platform in _INTERFACE_ADDRESS:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                request = struct.pack("256s", name.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(asking, _INTERFACE_ADDRESS[sys.platform], request)[20:24])
        except OSError as error:
            why = error.strerror
    raise TransportError(
        f"the IPv4 address of the interface {name!r} of this machine can't be found: {why}. Choose an interface (see "
        "`ip address`; transport.interface), or an address of this machine (transport.host)."
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
