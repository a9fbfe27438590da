"""Attacks by unknown peers that open TCP connections on loopback to one of two members."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from benchmarks.hostile.attack import Attack, Outcome
from diloco.protocol import Event, Lost, Received, Timing
from diloco.transport import (
    ASKS,
    NONCE_BYTES,
    PROOF_BYTES,
    Address,
    ConnectionManager,
    DonorService,
    TcpStreams,
    is_proof,
    new_secret,
    pack,
    proof,
    serve_probes,
)
from tests.transport.state_donors import state

__all__ = ["ATTACKS", "memory_bytes"]

SECRET = new_secret()
_LIMIT_S = 30.0
_BETWEEN_S = 0.02


def memory_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Pair:
    """Two members, the first of which is attacked while it receives messages from the second."""

    def __init__(self, secret: str) -> None:
        self.losses: list[str] = []
        self.heard_s = time.monotonic()
        self.stall_s = 0.0
        timing = Timing(heartbeat_s=0.2, silence_s=20.0)
        self.attacked = ConnectionManager(0, timing, TcpStreams(secret=secret), self._note)
        self.other = ConnectionManager(1, timing, TcpStreams(secret=secret), self._note)
        for each in (self.attacked, self.other):
            each.most_ranks = 64
            each.listen("127.0.0.1", range(1), "127.0.0.1")
            each.post(each.trust, range(2))
        serve_probes(self.attacked)
        self.donor = DonorService()
        held = state(numel=100_000)
        self.donor.source = lambda fragment: held
        self.attacked.services["fetch"] = self.donor.serve
        self.other.call(self.other.connect(0, self.attacked.address), _LIMIT_S)
        self._over = threading.Event()
        self._talking = threading.Thread(target=self._talk, daemon=True)
        self._talking.start()

    def _note(self, event: Event) -> None:
        match event:
            case Received(1, message) if message["kind"] == "here":
                now_s = time.monotonic()
                self.stall_s, self.heard_s = max(self.stall_s, now_s - self.heard_s), now_s
            case Lost(rank, loss) if rank < 2:
                self.losses.append(loss.text)

    def _talk(self) -> None:
        while not self._over.wait(_BETWEEN_S):
            self.other.post(self.other.send, 0, {"kind": "here"})

    def close(self) -> float:
        """Close both members, and return the longest time in which the attacked one received nothing from the other."""
        stall_s = max(self.stall_s, time.monotonic() - self.heard_s)
        self._over.set()
        self._talking.join()
        for each in (self.attacked, self.other):
            each.close()
        return stall_s


def frame(text: bytes, blob_bytes: int = 0, blob: bytes = b"") -> bytes:
    return struct.pack(">4sIQ", b"DLC1", len(text), blob_bytes) + text + blob


def connect(address: Address) -> socket.socket:
    made = socket.create_connection((address.host, address.port))
    made.settimeout(5.0)
    return made


def send(data: bytes, times: int = 1) -> Callable[[Address], None]:
    """Return an attack that sends ``data`` on a new connection each time and reads the reply."""

    def attack(address: Address) -> None:
        for _ in range(times):
            with contextlib.suppress(OSError), closing(connect(address)) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass

    return attack


def hold(data: bytes, connections: int) -> Callable[[Address], None]:
    """Return an attack that sends ``data`` on many connections and keeps them open for half a second."""

    def attack(address: Address) -> None:
        with ExitStack() as stack:
            for _ in range(connections):
                with contextlib.suppress(OSError):
                    client = stack.enter_context(closing(connect(address)))
                    client.sendall(data)
            time.sleep(0.5)

    return attack


def stream(first: bytes, again: bytes, seconds: float = 1.5) -> Callable[[Address], None]:
    """Return an attack that sends ``again`` repeatedly on one connection and reads nothing."""

    def attack(address: Address) -> None:
        with contextlib.suppress(OSError), closing(connect(address)) as client:
            client.settimeout(0.2)
            client.sendall(first)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                with contextlib.suppress(TimeoutError):
                    client.sendall(again)

    return attack


def slowly(data: bytes, seconds: float = 1.5) -> Callable[[Address], None]:
    """Return an attack that sends ``data`` one byte at a time."""

    def attack(address: Address) -> None:
        with contextlib.suppress(OSError), closing(connect(address)) as client:
            for byte in data:
                client.sendall(bytes([byte]))
                time.sleep(seconds / len(data))

    return attack


def hellos(ranks: Sequence[int]) -> Callable[[Address], None]:
    def attack(address: Address) -> None:
        for rank in ranks:
            send(hello(rank))(address)

    return attack


def replay(address: Address) -> None:
    """Send the valid proof of one connection, as a listener on the wire would see it, on 50 others.

    Raises:
        RuntimeError: if the proof is not accepted on its own connection, so that this is no replay.
    """
    nonce = bytes(NONCE_BYTES)
    with closing(connect(address)) as one:
        asked = one.recv(len(ASKS) + NONCE_BYTES, socket.MSG_WAITALL)
        ends = f"opens {nonce.hex()}", f"listens {asked[len(ASKS) :].hex()}"
        overheard = nonce + proof("tcp", SECRET, *ends)
        one.sendall(overheard)
        if not is_proof(one.recv(PROOF_BYTES, socket.MSG_WAITALL), "tcp", SECRET, *reversed(ends)):
            raise RuntimeError("The member did not accept a valid proof.")
    send(overheard + hello(1), 50)(address)


def hello(rank: Any, address: str = "127.0.0.1:1") -> bytes:
    return pack({"kind": "hello", "rank": rank, "address": address})


def door(name: str, attack: Callable[[Address], None], before: str = "", *, secret: str = "") -> Attack:
    """Return a row of the table for an attack on one of two members."""

    def run() -> Outcome:
        pair = Pair(secret)
        try:
            before_bytes, peak = memory_bytes(), [memory_bytes()]
            over = threading.Event()

            def watch() -> None:
                while not over.wait(0.02):
                    peak.append(memory_bytes())

            watching = threading.Thread(target=watch)
            watching.start()
            pair.stall_s, pair.heard_s = 0.0, time.monotonic()
            attack(pair.attacked.address)
            over.set()
            watching.join()
            losses = list(pair.losses)
        finally:
            stall_s = pair.close()
        return Outcome(
            ended=len(losses),
            stall_s=round(stall_s, 3),
            memory_bytes=max(0, max(peak) - before_bytes),
            escapes=sum(not each.isprintable() for each in losses),
        )

    return Attack(name=name, who="stranger", where="connection", run=run, before=before)


_FETCH = {"kind": "fetch", "fragment": 0, "after": 0, "snapshot": ""}
OPENINGS: dict[str, bytes] = {
    "half a head": b"DLC1\x00",
    "HTTP": b"GET / HTTP/1.1\r\nHost: me\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "a pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    "a text of 4 GB announced": struct.pack(">4sIQ", b"DLC1", 0xFFFFFFFF, 0),
    "a blob of 1 TB announced": struct.pack(">4sIQ", b"DLC1", 2, 1 << 40) + b"{}",
    "a text that never comes": struct.pack(">4sIQ", b"DLC1", 100, 0) + b"{",
    "no JSON": frame(b"{kind: hello}"),
    "JSON 16,000 levels deep": frame(b"[" * 16_000),
    "JSON with 1e400": frame(b'{"kind": "hello", "rank": 1e400, "address": "a"}'),
    "JSON with NaN": frame(b'{"kind": "hello", "rank": NaN, "address": "a"}'),
    "an integer of 10,000 digits": frame(b'{"kind": "hello", "rank": ' + b"9" * 10_000 + b', "address": "a"}'),
    "half of a pair of surrogates": frame(b'{"kind": "hello", "rank": 1, "address": "\\ud800"}'),
    "no kind": frame(b'{"rank": 1}'),
    "a kind that is no text": frame(b'{"kind": 7}'),
    "an address with escapes": hello(3, "\x1b]0;owned\x07:1"),
    "a hello as rank 2^40": hello(1 << 40),
    "a hello as rank 2^70": hello(1 << 70),
    "a hello as rank -3": hello(-3),
    "a hello as rank 1.5": hello(1.5),
    "a hello as the attacked rank itself": hello(0),
    "a link of nobody": pack({"kind": "link", "key": "0/0-1/0", "connection": 0, "rank": 1, "streams": 1}),
    "a fetch of fragment 2^80": pack(_FETCH | {"fragment": 1 << 80}),
    "a fetch from offset 2^63": pack(_FETCH | {"snapshot": "x", "offset": 1 << 63, "size": 1}),
    "a probe of 1 TB": pack({"kind": "probe", "ask": "give", "bytes": 1 << 40}),
    "a probe of lists": pack({"kind": "probe", "ask": [], "bytes": []}),
    "an unknown kind": pack({"kind": "launch"}),
}


def _attacks() -> Iterator[Attack]:
    for name, opening in OPENINGS.items():
        yield door(name, send(opening, 20))
    yield door("a hello as a living rank", send(hello(1)), "that replica ends")
    yield door("hellos as all ranks", hellos(range(64)), "they are replaced")
    yield door(
        "a first message of 1 MiB of []",
        send(frame(b'{"kind": "welcome", "x": [' + b"[]," * 340_000 + b"0]}"), 5),
        "stalls of 5 to 8 s",
    )
    yield door("first messages of 16 kB of []", send(frame(b'{"kind": "who", "x": [' + b"[]," * 5000 + b"0]}"), 100))
    yield door(
        "first messages with blobs of 16 MiB", send(frame(b'{"kind": "who"}', 1 << 24, bytes(1 << 24)), 24), "+552 MB"
    )
    yield door("300 connections that say nothing", hold(b"", 300), "no limit")
    yield door("300 connections with half a head", hold(b"DLC1\x00", 300), "no limit")
    yield door("300 connections that wait for a link", hold(OPENINGS["a link of nobody"], 300), "no limit")
    yield door("one byte at a time", slowly(hello(7)))
    yield door("a stream of texts of 16 kB", stream(hello(7), pack({"kind": "x", "words": "x" * 16_000})))
    yield door(
        "a stream of 5,000 lists each",
        stream(hello(7), frame(b'{"kind": "x", "x": [' + b"[]," * 5000 + b"0]}")),
        "stalls of 5 to 8 s",
    )
    yield door("a stream of messages of 17 kB", stream(hello(7), pack({"kind": "x", "words": "x" * 17_000})))
    yield door(
        "a stream of messages with blobs of 4 kB",
        stream(hello(7), pack({"kind": "store", "key": "k"}, bytes(4096))),
        "+546 MB",
    )
    yield door("a stream of beats", stream(hello(7), pack({"kind": "beat"}) * 1000))
    yield door("a thousand fetches on one connection", stream(b"", pack(_FETCH) * 1000), "not tried")
    yield door("a thousand fetches, each on its own", send(pack(_FETCH), 1000))
    yield door("300 fetches of a fragment that is not there", send(pack(_FETCH | {"fragment": 77}), 300))
    yield door("a thousand questions who is there", send(pack({"kind": "who"}), 1000))
    yield door("garbage for a second", stream(b"", os.urandom(1 << 16), 1.0))
    yield door("a hello and then garbage", stream(hello(7), os.urandom(1 << 16), 1.0))
    yield door("a hello as a member, with a secret", send(hello(1), 50), "no secret over TCP", secret=SECRET)
    yield door("a proof of zeros, with a secret", send(bytes(48) + hello(1), 50), secret=SECRET)
    yield door("a replayed proof, with a secret", replay, secret=SECRET)
    yield door(
        "300 connections that prove nothing, with a secret", hold(bytes(16), 300), "joiners kept out", secret=SECRET
    )
    yield door("garbage for a second, with a secret", stream(b"", os.urandom(1 << 16), 1.0), secret=SECRET)


ATTACKS = list(_attacks())
