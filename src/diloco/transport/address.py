"""Addresses and ports: parsing them, and finding the address of this machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from diloco.errors import ConfigurationError


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


def local_host_towards(remote: Address) -> str:
    """Return the address of this machine that the route to ``remote`` starts from.

    Nothing is sent, because connecting a datagram socket only looks up the route.
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
    return text.isascii() and text.isdigit()
