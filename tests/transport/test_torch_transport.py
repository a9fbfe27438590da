"""The torch.distributed transport: the contract, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from diloco.errors import TransportError
from diloco.transport.base import Transport
from diloco.transport.peers.data_link import LinkRequest
from diloco.transport.peers.threads import Mailbox
from diloco.transport.shaping import congestion_control, streams_to_each
from diloco.transport.torch_distributed.gloo_link import GlooLink, link_opener, make_device
from tests.transport.contract import MakeEndpoints, TransportContract
from tests.transport.wires import Wires, at_once


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.close()


class TestTorchContract(TransportContract):
    @pytest.fixture
    def make_endpoints(self, wires: Wires) -> MakeEndpoints:
        def make(num_replicas: int) -> Sequence[Transport]:
            return wires.meet(num_replicas)

        return make


def test_both_ends_of_a_link_open_the_larger_number_of_streams_at_once() -> None:
    boxes, device = (Mailbox(), Mailbox()), make_device("127.0.0.1", "")

    def end(mine: int, streams: int) -> LinkRequest:
        return LinkRequest("link", 1 - mine, mine == 0, streams, timeout_s=20.0, tell=boxes[1 - mine].put)

    def open_end(mine: int, streams: int) -> GlooLink:
        link = link_opener(device, boxes[mine])(end(mine, streams))
        assert isinstance(link, GlooLink)
        return link

    first, second = at_once([lambda: open_end(0, 2), lambda: open_end(1, 5)])
    try:
        assert (first.num_streams, second.num_streams) == (5, 5)
        for stream in range(5):
            got = torch.empty(3)
            coming = second.receive(got, stream, tag=stream)
            first.send(torch.full((3,), float(stream)), stream, tag=stream).wait()
            coming.wait()
            assert got.tolist() == [stream] * 3
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("said", [b"0", b"65", b"-1", b"many"])
def test_a_number_of_streams_that_is_none_is_refused(said: bytes) -> None:
    box = Mailbox()
    box.put("link/streams-of-1", said)
    request = LinkRequest("link", 1, True, 2, timeout_s=20.0, tell=lambda key, value: None)
    with pytest.raises(TransportError, match="streams"):
        link_opener(make_device("127.0.0.1", ""), box)(request)


def test_a_replica_that_loss_slows_down_opens_more_streams() -> None:
    assert congestion_control() in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    for others in (1, 2, 4):
        assert streams_to_each(others, "bbr") * others == 4
        assert streams_to_each(others, "cubic") == streams_to_each(others, "") == 4 * streams_to_each(others, "bbr")
