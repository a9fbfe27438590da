"""Payload connections of a view: what becomes of those that do not come to be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from diloco.errors import TransportError
from diloco.membership.view import View
from diloco.protocol.rules import Rules
from diloco.transport.peers.connection_manager import ConnectionManager
from diloco.transport.peers.data_link import DataLink, LinkRequest
from diloco.transport.peers.threads import Threads
from diloco.transport.peers.view_links import ViewLinks

LIMIT_S = 30.0


class Link:
    closed = False

    def close(self) -> None:
        self.closed = True


class Board:
    """Does at once, in whatever thread, what is to be done in the control thread."""

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        function(*arguments)


@pytest.mark.parametrize("error", [TransportError("no way"), ValueError("no way"), OSError(24, "no way"), KeyError()])
def test_a_link_that_fails_in_any_way_is_a_failure_of_that_link(error: Exception) -> None:
    """One that counted as made would keep the round waiting for its whole time-out."""
    made, failed, told = Link(), dict[int, str](), threading.Event()

    def open_link(request: LinkRequest) -> DataLink:
        if request.rank == 2:
            raise error
        return cast(DataLink, made)

    def note(links: Mapping[int, str]) -> None:
        failed.update(links)
        told.set()

    links = ViewLinks(
        Rules(0, 0, 1, None, 5.0, 1 << 19), 1, 5.0, cast(ConnectionManager, Board()), Threads(), open_link, note
    )
    wanted = links.connect(View(0, (0, 1, 2)))
    with pytest.raises(TransportError) as caught:
        wanted.result(LIMIT_S)
    assert told.wait(LIMIT_S)
    assert list(failed) == [2]
    assert failed[2] in str(caught.value)
    assert str(error) in failed[2]
    assert failed[2], "there is always a reason"
    links.close()
    assert made.closed
