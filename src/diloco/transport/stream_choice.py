"""How many connections payloads take: a few where a connection keeps its rate, more where every loss slows one down."""

from __future__ import annotations

import socket

__all__ = ["congestion_control", "streams_to_each"]

KEEPING_THEIR_RATE = ("bbr",)
"""Congestion control that takes neither a lost packet nor a pause for a link that is full."""

FEW, MANY = 4, 16
"""To all others together. One connection that halves its rate at every loss carries little over a long way, and after a
pause begins with ten packets: many together carry more, and begin with more. Where a connection keeps its rate, more of
them only fill the queue on the way, and what is lost there is sent again."""


def streams_to_each(others: int, control: str) -> int:
    """Payload connections to each of ``others`` replicas by default.

    >>> streams_to_each(1, "bbr"), streams_to_each(2, "cubic"), streams_to_each(40, "cubic")
    (4, 8, 1)
    """
    return max(1, round((FEW if control in KEEPING_THEIR_RATE else MANY) / max(1, others)))


def congestion_control() -> str:
    """What new connections of this process get, such as cubic or bbr; "" where the kernel doesn't tell."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode("ascii")
