"""The doctor names every way in which a connection can fail."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import pytest

from diloco.cli import main
from diloco.transport import MOST_BYTES, Address, Finding, examine, pack
from tests.transport.wires import Wires, answering_probes


def look(address: Address, num_bytes: int = 300_000, timeout_s: float = 20.0) -> Finding:
    return asyncio.run(examine(address, num_bytes, timeout_s))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_way_that_works_has_a_latency_and_a_rate_each_way(host: str) -> None:
    with answering_probes(host) as address:
        finding = look(address)
    assert finding.ok, finding
    assert finding.resolved == (host,)
    assert finding.latency_s is not None
    assert 0 < finding.latency_s < 20
    assert finding.up_bits_per_s is not None
    assert finding.down_bits_per_s is not None
    assert min(finding.up_bits_per_s, finding.down_bits_per_s) > 0


def test_a_replica_in_training_answers_too(wires: Wires) -> None:
    assert look(wires.meet(2)[0].address).ok


def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    finding = look(Address("127.0.0.1", port))
    assert (finding.ok, finding.problem) == (False, "nothing listens there (connection refused)")
    assert "diloco doctor --listen" in finding.advice


def test_a_name_that_does_not_resolve() -> None:
    finding = look(Address("nobody.invalid", 29400))
    assert finding.problem.startswith("the name does not resolve")
    assert finding.resolved == ()


def test_something_that_connects_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        finding = look(Address("127.0.0.1", silent.getsockname()[1]), timeout_s=0.2)
    assert finding.problem == "it accepted the connection but did not respond for 0.2 s"


def test_something_that_is_no_diloco() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        finding = look(Address("127.0.0.1", other.getsockname()[1]))
        thread.join()
    assert finding.problem.startswith("what answers there is not a diloco: data that begins with b'HTTP'")


def test_nobody_is_made_to_move_more_than_is_allowed() -> None:
    with answering_probes() as address, socket.create_connection((address.host, address.port)) as fetcher:
        fetcher.settimeout(20)
        fetcher.sendall(pack({"kind": "probe", "ask": "give", "bytes": MOST_BYTES + 1}))
        assert fetcher.recv(1) == b"", "the connection is closed without an answer"


def test_the_command_names_each_failure_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with answering_probes() as address:
        assert main(["doctor", str(address), "nobody.invalid:1", "--size", "100kB", "--json"]) == 1
        captured = capsys.readouterr()
        well, ill = json.loads(captured.out)
        assert (well["ok"], ill["ok"]) == (True, False)
        assert "nobody.invalid:1: the name does not resolve" in captured.err
        assert main(["doctor", str(address), "--size", "100kB"]) == 0
        assert " ok " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["a:1", "--listen", "a:1"], ["a:1", "--size", "65MB"], ["a"], ["a:1", "--timeout", "0s"]]
)
def test_misuse_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith("diloco: ")
