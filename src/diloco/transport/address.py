"""Addresses and ports: parsing them, and finding the address of this machine."""

from __future__ import annotations

import ipaddress
import re
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


def is_private(host: str) -> bool:
    """Return whether a host is an address that only its own network, or machine, reaches.

    >>> is_private("192.168.1.2"), is_private("9.9.9.9"), is_private("example.org")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:  # a name
        return False


_PLACE = re.compile(r"(\[[^][\s]+\]|[^][:/\s]*):([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_address(text: str, *, key: str = "the address") -> Address:
    """Parse ``HOST:PORT``; an IPv6 host must be in brackets.

    Raises:
        ConfigurationError: if ``text`` has another form; the message names ``key``, the option.

    >>> parse_address("[fe80::1]:29400")
    Address(host='fe80::1', port=29400)
    """
    host, ports = _parse(text)
    if not host or len(ports) != 1:
        raise ConfigurationError(f"{key} must be HOST:PORT, such as 10.0.0.1:29400 or [fe80::1]:29400, got {text!r}.")
    return Address(host, ports[0])


def parse_listen(text: str, *, key: str = "network.listen") -> tuple[str, range]:
    """Parse ``HOST:PORT`` or ``HOST:FIRST-LAST``, where to listen; no host: the default, port 0: any free one.

    Raises:
        ConfigurationError: if ``text`` has another form; the message names ``key``, the option.

    >>> parse_listen("0.0.0.0:29400-29402"), parse_listen(":0")
    (('0.0.0.0', range(29400, 29403)), ('', range(0, 1)))
    """
    host, ports = _parse(text)
    if not ports:
        raise ConfigurationError(f"{key} must be HOST:PORT or HOST:FIRST-LAST, such as 0.0.0.0:31330, got {text!r}.")
    return host, ports


def _parse(text: str) -> tuple[str, range]:
    match = _PLACE.fullmatch(text) if isinstance(text, str) and text.isprintable() else None
    if match is None or int(match[3] or match[2]) > 65535:
        return "", range(0)
    return match[1].strip("[]"), range(int(match[2]), int(match[3] or match[2]) + 1)


def local_host_towards(remote: Address) -> str:
    """Return the address of this machine that the route to ``remote`` starts from.

    Nothing is sent, because connecting a datagram socket only looks up the route.
    """
    try:
        found = socket.getaddrinfo(remote.host, remote.port or 9, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # a name such as "a..b", which no resolver takes
        raise OSError(f"it isn't a valid name ({error})") from error
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0]).partition("%")[0]
