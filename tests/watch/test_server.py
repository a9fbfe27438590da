"""The page over HTTP: which requests are answered, and with what."""

import gzip
import http.client
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from diloco.watch import PageServer


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer("127.0.0.1", 0) as running:
        running.show(b'{"runs": []}')
        yield running


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    """Return the status, the headers and the body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def cookie_of(server: PageServer) -> str:
    _, headers, _ = ask(server, f"/?token={server.token}")
    return str(headers["Set-Cookie"]).partition(";")[0]


def test_page_has_a_policy_that_lets_nothing_else_in(server: PageServer) -> None:
    cookie = cookie_of(server)
    status, headers, body = ask(server, "/", Cookie=cookie)
    assert (status, headers["Content-Security-Policy"]) == (200, "frame-ancestors 'none'")
    page = body.decode()
    policy = dict(each.strip().split(" ", 1) for each in re.findall(r'Policy" content="(.*?)"', page)[0].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert all(each.startswith("'sha256-") for each in policy["script-src"].split())
    assert not re.findall(r"(?:https?:)?//[\w-]+\.\w+", page[: page.index("plotly.js v")]), "it names no other site"
    status, headers, compressed = ask(server, "/", Cookie=cookie, Accept_Encoding="gzip, br")
    assert (headers["Content-Encoding"], gzip.decompress(compressed)) == ("gzip", body)


def test_data_is_sent_again_only_if_it_has_changed(server: PageServer) -> None:
    cookie = cookie_of(server)
    _, headers, body = ask(server, "/data.json", Cookie=cookie)
    assert (body, headers["ETag"][::65]) == (b'{"runs": []}', '""'), "an entity tag is quoted"
    for known in ("{}", "W/{}", '"other", {}'):
        again = {"Cookie": cookie, "If_None_Match": known.format(headers["ETag"])}
        status, unchanged, body = ask(server, "/data.json", **again)
        assert (status, unchanged["ETag"], body) == (304, headers["ETag"], b"")
    server.show(b'{"runs": [1]}')
    assert ask(server, "/data.json", **again)[2] == b'{"runs": [1]}'


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("POST", "/", "localhost", 501),
        ("GET", "/../server.py", "localhost", 404),
        ("GET", "http://localhost/data.json", "localhost", 404),
        ("GET", "/data.json", "127.0.0.1:8500", 200),
        ("GET", "/data.json", "[::1]:8500", 200),
        ("GET", "/data.json", "evil.example", 400),  # a name of another site that resolves to this address
        ("GET", "/data.json", "", 400),
        ("GET", f"/{'x' * 70_000}", "localhost", 414),
    ],
)
def test_nothing_is_changed_and_only_its_own_names_are_answered(
    server: PageServer, method: str, path: str, host: str, status: int
) -> None:
    code, headers, _ = ask(server, path, method, Cookie=cookie_of(server), Host=host)
    assert (code, headers["X-Content-Type-Options"]) == (status, "nosniff")


@pytest.mark.parametrize(
    "path", ["/", "/data.json", "/?token=wrong", "/data.json?token=", "/?token={token}x", "//?token=%ff"]
)
def test_nothing_is_shown_without_the_token(server: PageServer, path: str) -> None:
    assert ask(server, path.format(token=server.token))[0] == 403
    assert ask(server, path, Cookie=f"diloco-watch-{server.port}=; x={server.token}")[0] == 403


@pytest.mark.parametrize("path", ["/", "//evil.example/", "/\\evil.example", "/data.json"])
def test_the_token_leads_to_the_page_and_nowhere_else(server: PageServer, path: str) -> None:
    status, headers, _ = ask(server, f"{path}?token={server.token}")
    assert (status, headers["Location"]) == (303, "/")
    cookie, *rules = headers["Set-Cookie"].split("; ")
    assert (rules, cookie.partition("=")[0]) == (["HttpOnly", "SameSite=Lax", "Path=/"], f"diloco-watch-{server.port}")
    assert ask(server, "/data.json", Cookie=f"other=1; {cookie}")[0] == 200


@pytest.mark.parametrize("said", [b"", b"GET /data.json HTTP/1.1\r\nHost: local"])
def test_connections_that_never_finish_a_request_delay_no_other(server: PageServer, said: bytes) -> None:
    cookie = cookie_of(server)
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(100)]
        for each in slow:
            each.sendall(said)
        assert ask(server, "/data.json", Cookie=cookie)[0] == 200
        assert slow[0].recv(99) == b"", "the oldest are hung up on"
