"""The doctor names every way in which a connection can fail."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from contextlib import closing

import pytest

from diloco.cli import main
from diloco.transport import Address, examine
from tests.transport.nowhere import nobody_at
from tests.transport.relays import frame, stranger_at
from tests.transport.wires import Wires, answering_probes

LIMIT_S = 20.0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_way_that_works_has_a_latency_and_a_rate_each_way(host: str) -> None:
    with answering_probes(host) as address:
        finding = asyncio.run(examine(address, 300_000, LIMIT_S))
    assert not finding.problem
    assert 0 < finding.latency_s < LIMIT_S
    assert min(finding.up_bits_per_s, finding.down_bits_per_s) > 0


def test_a_replica_in_training_answers_too(wires: Wires) -> None:
    assert not asyncio.run(examine(wires.meet(2)[0].address, 1000, LIMIT_S)).problem


def test_each_way_that_does_not_work_is_told_apart() -> None:
    with nobody_at() as address:
        finding = asyncio.run(examine(address, 1000, LIMIT_S))
    assert finding.problem.startswith("nothing listens there (connection refused); start a replica or `diloco doctor")
    finding = asyncio.run(examine(Address("nobody.invalid", 29400), 1000, LIMIT_S))
    assert finding.problem.startswith("the name does not resolve")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
        finding = asyncio.run(examine(address, 1000, 0.2))
        assert finding.problem.startswith("it accepted the connection but did not respond for 0.2 s; ")

        def answer() -> None:
            for _ in range(4):  # the first two are of the connection that was not answered
                with server.accept()[0] as caller, contextlib.suppress(ConnectionError):
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    caller.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        finding = asyncio.run(examine(address, 1000, LIMIT_S))
        thread.join()
    assert finding.problem.startswith("what answers there is not a diloco: the other side does not use this version")


def test_nobody_is_made_to_move_more_than_is_allowed() -> None:
    with answering_probes() as address, closing(stranger_at(address)) as fetcher:
        fetcher.sendall(frame({"kind": "probe", "give": 1 << 31}))
        assert fetcher.recv(1) == b"", "the connection is closed without an answer"


def test_the_command_names_each_failure_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with answering_probes() as address:
        assert main(["doctor", str(address), "nobody.invalid:1", "--size", "100kB"]) == 1
        captured = capsys.readouterr()
        assert [line.split()[1] for line in captured.out.splitlines()[1:]] == ["ok", "FAILED"]
        assert "nobody.invalid:1: the name does not resolve" in captured.err
        assert main(["doctor", str(address), "--size", "100kB"]) == 0


@pytest.mark.parametrize("arguments", [[], ["a:1", "--listen", "a:1"], ["a:1", "--size", "65MB"], ["a"]])
def test_misuse_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err
