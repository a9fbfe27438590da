"""The page over HTTP: which requests are answered, and with what."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from diloco.watch import Board, export_page, make_app

HOSTILE = "</script><script>alert('here')</script><img src=x onerror=alert(1)>"


def client(board: Board | None = None, **given: Any) -> TestClient:
    return TestClient(make_app(board or Board(), **given), base_url="http://127.0.0.1:8500")


def messages(text: str) -> tuple[str, Any]:
    kind, data = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", text).groups()  # type: ignore[union-attr]
    return kind, json.loads(data)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/watch.js", "text/javascript"),
        ("/watch.css", "text/css"),
        ("/plotly.js", "text/javascript"),
        ("/data.json", "application/json"),
    ],
)
def test_every_part_comes_with_a_policy_that_lets_nothing_else_in(path: str, kind: str) -> None:
    answer = client().get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    policy = dict(each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert "http" not in answer.headers["content-security-policy"]


def test_the_page_names_no_other_site() -> None:
    page = client().get("/").text + client().get("/watch.js").text + client().get("/watch.css").text
    assert not re.findall(r"(?:https?:)?//[\w-]+\.\w+", page)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(method: str) -> None:
    assert client().request(method, "/data.json").status_code == 405


@pytest.mark.parametrize(("host", "code"), [("127.0.0.1:8500", 200), ("localhost", 200), ("evil.example", 400)])
def test_it_answers_to_its_own_names_alone(host: str, code: int) -> None:
    """A page of another site whose host name resolves to this address can't read this page (DNS rebinding)."""
    assert client().get("/data.json", headers={"host": host}).status_code == code


def test_a_token_opens_the_page_in_one_browser() -> None:
    following: list[str] = []
    app = make_app(Board(), hosts=("*",), token="right", port=8500, on_used=following.append)
    visitors = [TestClient(app, base_url="http://127.0.0.1:8500") for _ in range(3)]
    for path in ("/", "/data.json", "/events", "/?token=wrong", "/data.json?token=", "/?token=rightx"):
        assert visitors[0].get(path).status_code == 403
    for visitor, token in ((visitors[0], "right"), (visitors[1], None)):
        answer = visitor.get(f"/?token={token or following[-1]}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert all(
            word in answer.headers["set-cookie"] for word in ("diloco-watch-8500=", "HttpOnly", "SameSite=strict")
        )
        assert (token or following[-2]) not in answer.headers["set-cookie"]
    assert [visitor.get("/data.json").status_code for visitor in visitors] == [200, 200, 403]
    assert visitors[2].get("/?token=right").status_code == 403, "it has been used"
    assert visitors[0].get("/?token=right", follow_redirects=False).headers["location"] == "/"
    assert len({"right", *following}) == 3


@pytest.mark.parametrize(
    "path", ["//evil.example/?token=right", "/\\evil.example?token=right", "/data.json?token=right"]
)
def test_a_token_leads_to_the_page_and_nowhere_else(path: str) -> None:
    visitor = TestClient(make_app(Board(), token="right"), base_url="http://127.0.0.1:8500")
    answer = visitor.get(f"http://127.0.0.1:8500{path}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_pages_on_two_ports_have_two_cookies() -> None:
    """Browsers send a cookie to every port of its host."""
    visitor = TestClient(make_app(Board(), token="a", port=1), base_url="http://127.0.0.1")
    other = TestClient(make_app(Board(), token="b", port=2), base_url="http://127.0.0.1", cookies=visitor.cookies)
    visitor.get("/?token=a")
    other.cookies.update(visitor.cookies)
    other.get("/?token=b")
    visitor.cookies.update(other.cookies)
    assert (visitor.get("/data.json").status_code, other.get("/data.json").status_code) == (200, 200)


def test_readers_get_everything_and_then_what_changes() -> None:
    async def read() -> list[tuple[str, Any]]:
        board = Board()
        board.show({"runs": {"0": {"step": 1, "name": "a"}}})
        reader = board.messages()
        got = [messages(await anext(reader))]
        board.show({"runs": {"0": {"step": 1, "name": "a"}}})
        board.show({"runs": {"0": {"step": 2, "name": "a"}}})
        got.append(messages(await anext(reader)))
        await reader.aclose()  # type: ignore[attr-defined]
        return got

    everything = {"runs": {"0": {"step": 1, "name": "a"}}}
    assert asyncio.run(read()) == [("all", everything), ("patch", {"runs": {"0": {"step": 2}}})]


def test_a_reader_that_is_too_slow_gets_everything_again_and_holds_nothing_up() -> None:
    async def read() -> list[tuple[str, Any]]:
        board = Board()
        reader = board.messages()
        await anext(reader)
        for step in range(1_000):
            board.show({"step": step})
        got = [messages(await anext(reader))]
        while got[-1][1]["step"] < 999:
            got.append(messages(await anext(reader)))
        return got

    got = asyncio.run(read())
    assert got[0][0] == "all"
    assert len(got) < 20


def test_so_many_readers_and_no_more() -> None:
    async def fill() -> tuple[Board, list[Any]]:
        board = Board()
        readers = [board.messages() for _ in range(40)]
        for reader in readers:
            if not board.full:
                await anext(reader)
        assert client(board).get("/events").status_code == 503
        return board, readers

    asyncio.run(fill())


def test_an_exported_page_holds_what_strangers_wrote_as_data() -> None:
    page = export_page({"runs": {"0": {"name": HOSTILE}}})
    assert HOSTILE not in page
    assert "<img src=x" not in page
    (held,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(held)["runs"]["0"]["name"] == HOSTILE
    assert "default-src 'none'; script-src 'sha256-" in page
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:)', page)
