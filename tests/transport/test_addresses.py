"""Parsing addresses and ports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigurationError
from diloco.transport import Address, parse_address, parse_listen

PORTS = st.integers(0, 65535)
WORDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=6)
NAMES = st.builds(str.join, st.sampled_from([".", "-", ".-"]), st.lists(WORDS, min_size=1, max_size=4))


@given(st.ip_addresses().map(str) | NAMES, PORTS)
def test_an_address_is_written_as_it_is_read(host: str, port: int) -> None:
    """Property: names, IPv4, and IPv6 in brackets."""
    assert parse_address(str(Address(host, port))) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":29400", "[]:29400", "::1:29400", "fe80::1", "host:65536", "host:-1", "host:2 9",
     "host:٣", "host:²", "host:http", "http://host", "[::1]", "a:b:1", "\x1b[2J:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_under_the_name_it_was_given_as(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--join must be HOST:PORT, such as .*, got"):
        parse_address(text, key="--join")


@pytest.mark.parametrize("text", ["", "-", "a:1-", "a:-1", "a:2-1", "a:1-65536", "a", "a:1,2", "a:1-2-3", "a:٣"])
def test_what_is_no_place_to_listen_at_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"network.listen must be HOST:PORT or HOST:FIRST-LAST, .*, got"):
        parse_listen(text)
