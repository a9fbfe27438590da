"""The payload links of a view, and what happens to those that can't be opened."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from diloco.algorithm import Contribution, RoundId, make_codec
from diloco.errors import TransportError
from diloco.membership import Policy, View
from diloco.protocol import Policies, Rules
from diloco.transport import ConnectionManager, HostCopies, LinkRequest, PayloadLinks, ReliableLink, Threads
from tests.gpus import Cuda, on_gpu

LIMIT_S = 30.0
RULES = Rules(0, 0, 1, None, 5.0, 1 << 19, bytes(32))
POLICIES = Policies(Policy(), continue_without_lost=True, raise_on_loss=False, streams=1, connect_timeout_s=5.0)


class Link:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("error", [TransportError("no way"), ValueError("no way"), OSError(24, "no way"), KeyError()])
def test_a_link_that_fails_in_any_way_is_a_failure_of_that_link(
    error: Exception, connections: ConnectionManager
) -> None:
    """A link that wrongly counted as open would stall the round until its timeout."""
    made = Link()

    def open_link(request: LinkRequest) -> ReliableLink:
        if request.rank == 2:
            raise error
        return cast(ReliableLink, made)

    links = PayloadLinks(RULES, POLICIES, connections, Threads(print), idle_s=0.0)
    wanted = links.open(View(0, (0, 1, 2)), open_link)
    with pytest.raises(TransportError) as caught:
        wanted.result(LIMIT_S)
    assert caught.value.replicas == (2,)
    assert str(error) in str(caught.value)
    assert str(caught.value), "there is always a reason"
    links.close()
    assert made.closed


def test_links_are_made_for_rounds_and_not_for_every_view_on_the_way_to_a_swarm(connections: ConnectionManager) -> None:
    """Links are opened at once if the previous view had rounds."""
    made: list[str] = []

    def open_link(request: LinkRequest) -> ReliableLink:
        made.append(request.key)
        return cast(ReliableLink, Link())

    threads = Threads(print)
    links = PayloadLinks(RULES, POLICIES, connections, threads, idle_s=LIMIT_S)
    for view_id in range(3):
        links.open(View(view_id, (0, 1)), open_link)
    wanted = links.open(View(3, (0, 1)), open_link)
    assert not made
    links.need()
    assert wanted.result(LIMIT_S)
    assert links.open(View(4, (0, 1)), open_link).result(LIMIT_S)
    links.close()
    assert threads.join(LIMIT_S)
    assert made == ["3/0-1/0", "4/0-1/0"]


def test_a_payload_is_copied_on_a_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy runs on the stream of its source: an event of another GPU's stream would come too early."""
    cuda, empty, copies = Cuda().install(monkeypatch), torch.empty, HostCopies()
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **kind: empty(*shape, **kind))
    for index in (1, 0, 1):
        payload = on_gpu(torch.full((4,), index, dtype=torch.uint8), index)
        given = Contribution(round=RoundId(0, 0), replica=0, codec=make_codec("float32"), numel=1, payload=payload)
        copied, _ = copies.start(given)
        assert copied.payload.tolist() == [index] * 4
        assert {place for _, place in cuda.log} == {torch.device("cuda", index)}
        assert [what for what, _ in cuda.log] == ["follows", "copies in", "marks", "keeps"]
        cuda.log.clear()
