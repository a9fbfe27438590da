"""``python -m benchmarks.overhead.links``: processor time of moving the payloads of a round over payload links.

Two processes with seven links between them, on the loopback interface, transfer in each round what one of eight
replicas transfers for 6.3M values in fp4: an eighth of its contribution to each other replica, then the mean of its own
eighth in int8. Nothing is encoded, summed or decided. The links are plain TCP, or the direct streams of a swarm (TLS).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from diloco.algorithm import RoundId, make_codec
from diloco.transport import (
    ControlConnection,
    DirectStreams,
    PeerLink,
    RoundMessages,
    Stripe,
    TcpCounters,
    UplinkMeter,
    round_tag,
)

HOST, LIMIT_S = "127.0.0.1", 60.0
LINKS, VALUES = 7, 6_295_552 // 8
PIECE_BYTES = 1 << 19
WARM = 2

T = TypeVar("T")


class End:
    """The links of one of the two processes, which run in a separate thread."""

    def __init__(self) -> None:
        self.links: dict[int, PeerLink] = {}
        self._loop = asyncio.new_event_loop()
        self._kept: list[asyncio.StreamWriter] = []
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    async def listen(self, direct: bool) -> Any:
        """Listen, and return what the other end needs to connect."""
        if not direct:
            server = await asyncio.start_server(self._use, HOST)
            return server.sockets[0].getsockname()[1]
        streams = DirectStreams("one", {})
        await streams.listen([HOST], 0, self._use)
        return streams.offer("other", [HOST])

    async def connect(self, offer: Any, direct: bool) -> None:
        """Open all links to the end whose `listen` returned ``offer``."""
        for _ in range(LINKS):
            opening = DirectStreams("other", {}).open(offer) if direct else asyncio.open_connection(HOST, str(offer))
            await self._use(*await opening)

    def move(self, number: int) -> None:
        """Transfer the payloads of one round in both directions."""
        messages = RoundMessages(0, RoundId(0, number), self._loop, PIECE_BYTES, self.links)
        for name, second in (("fp4", False), ("int8", True)):
            for received in self.call(self._exchange(messages, name, second=second)):
                received.result(LIMIT_S)
        messages.finish()

    async def _exchange(self, messages: RoundMessages, name: str, *, second: bool) -> list[Future[None]]:
        codec = make_codec(name)
        for link in self.links.values():
            link.note_ready(round_tag(0, messages.round_id))
        receiving: list[Future[None]] = []
        for piece, (start, stop) in enumerate(messages.pieces(0, VALUES, codec)):
            size = codec.payload_bytes(stop - start)
            for other in self.links:
                receiving.append(messages.receive(other, torch.empty(size, dtype=torch.uint8), piece, second=second))
                messages.send((other,), torch.ones(size, dtype=torch.uint8), piece, second=second)
        return receiving

    async def _use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        control = cast(ControlConnection, SimpleNamespace(rank=0, token="", opened=True))
        link, transport = PeerLink(self._loop, control, UplinkMeter(TcpCounters)), writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        reader.feed_eof()
        already = await reader.read()
        connection = Stripe(link, transport, LIMIT_S)
        connection.begin(already)
        link.add(0, connection)
        self._kept.append(writer)
        self.links[len(self.links)] = link


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.links", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="number of measured rounds")
    parser.add_argument("--end", choices=("tcp", "tls"), help=argparse.SUPPRESS)
    parser.add_argument("--offer", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.end:
        be_an_end(given.end == "tls", given.offer, given.rounds)
        return
    print("| links | CPU of a process per round, ms: user, system | CPU-s per GB sent and received |\n|---|---|---|")
    for kind, words in (("tcp", "TCP"), ("tls", "direct streams (TLS)")):
        user_s, system_s, moved_bytes = measure(kind, given.rounds)
        per_gb = (user_s + system_s) / moved_bytes * 1e9
        print(f"| {words} | {1e3 * user_s:.1f}, {1e3 * system_s:.1f} | {per_gb:.2f} |", flush=True)


def measure(kind: str, rounds: int) -> tuple[float, float, int]:
    """Return the user seconds, system seconds and bytes moved of a process per round, averaged over both processes."""
    command = [sys.executable, "-m", "benchmarks.overhead.links", "--end", kind, "--rounds", str(rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        offer = one.stdout.readline().strip()
        with subprocess.Popen([*command, "--offer", offer], stdout=subprocess.PIPE, text=True) as other:
            used = [json.loads(each.communicate()[0]) for each in (one, other)]
    return (used[0][0] + used[1][0]) / 2, (used[0][1] + used[1][1]) / 2, used[0][2]


def be_an_end(direct: bool, offer: str | None, rounds: int) -> None:
    """Run as one of the two processes: listen, or connect to ``offer``; print the processor time per round."""
    torch.set_num_threads(1)
    end = End()
    if offer is None:
        print(json.dumps(end.call(end.listen(direct))), flush=True)
    else:
        end.call(end.connect(json.loads(offer), direct))
    while len(end.links) < LINKS:
        time.sleep(0.01)
    for number in range(WARM):
        end.move(number)
    before = os.times()
    for number in range(WARM, WARM + rounds):
        end.move(number)
    after = os.times()
    moved_bytes = 2 * LINKS * sum(make_codec(name).payload_bytes(VALUES) for name in ("fp4", "int8"))
    print(json.dumps([(after[0] - before[0]) / rounds, (after[1] - before[1]) / rounds, moved_bytes]), flush=True)
    time.sleep(1.0)  # the other end may still wait for acknowledgements
    os._exit(0)  # without closing the connections, which are no longer needed


if __name__ == "__main__":
    main()
