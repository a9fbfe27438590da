"""Addresses and ports: parsing them, and finding the addresses of this machine."""

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
"""The ``ioctl`` request that returns an interface's address (SIOCGIFADDR), by platform."""


@dataclass(frozen=True)
class Address:
    """The address at which a process listens.

    >>> str(Address("::1", 29400))
    '[::1]:29400'
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, key: str = "the address") -> Address:
    """Parse ``HOST:PORT``; an IPv6 host must be in brackets.

    Raises:
        ConfigurationError: if ``text`` has another form; the message names ``key``, the option.

    >>> parse_address("[fe80::1]:29400")
    Address(host='fe80::1', port=29400)
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host.startswith("[") and host.endswith("]")
    if (
        not colon
        or not bare
        or not bare.isprintable()
        or not _is_number(port)
        or int(port) > 65535
        or (":" in bare and not bracketed)
    ):
        raise ConfigurationError(f"{key} must be HOST:PORT, such as 10.0.0.1:29400 or [fe80::1]:29400, got {text!r}.")
    return Address(bare, int(port))


def parse_ports(text: str, *, key: str = "ports") -> range:
    """Parse ``PORT``, ``FIRST-LAST``, or ``0`` for any free port.

    Raises:
        ConfigurationError: if ``text`` has another form; the message names ``key``, the option.

    >>> parse_ports("29400-29402")
    range(29400, 29403)
    """
    first, dash, last = text.partition("-")
    if _is_number(first) and (not dash or _is_number(last)):
        low, high = int(first), int(last or first)
        if low <= high <= 65535 and (low > 0 or not dash):
            return range(low, high + 1)
    raise ConfigurationError(
        f"{key} must be a port such as 29400, a range such as 29400-29431, or 0 for any free port, got {text!r}."
    )


def address_of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface of this machine.

    Raises:
        TransportError: if there is no such interface, or it has no IPv4 address.

    >>> address_of_interface("lo")
    '127.0.0.1'
    """
    why: str | None = f"looking it up is not supported on {sys.platform}"
    if sys.platform != "win32" and sys.platform in _INTERFACE_ADDRESS:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = struct.pack("256s", name.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe, _INTERFACE_ADDRESS[sys.platform], request)[20:24])
        except OSError as error:
            why = error.strerror
    raise TransportError(
        f"The IPv4 address of the network interface {name!r} can't be determined: {why}. Choose another interface "
        "(`ip address` lists them), or an address of this machine with network.listen."
    )


def local_host_towards(remote: Address) -> str:
    """Return the address of this machine that the route to ``remote`` starts from.

    Nothing is sent, because connecting a datagram socket only looks up the route.

    Raises:
        OSError: if the name does not resolve or there is no route.
    """
    try:
        found = socket.getaddrinfo(remote.host, remote.port or 9, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # a name such as "a..b", which no resolver takes
        raise OSError(f"it is no valid name ({error})") from error
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0]).partition("%")[0]


def _is_number(text: str) -> bool:
    """Return whether ``text`` consists of ASCII digits; `int` accepts more than that."""
    return text.isascii() and text.isdigit()
