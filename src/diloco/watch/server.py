"""The HTTP server of the page: read-only, with live updates as server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from diloco.watch.page import live_page, part, plotly_script
from diloco.watch.page_data import difference

__all__ = ["LOOPBACK", "Board", "make_app"]

_MOST_COOKIES = 256
_ALIVE_S = 15.0  # a comment is sent after this much silence, to notice readers that have disconnected

_MOST_READERS = 32

# plotly.js adds inline styles to the page, and exports images of curves through blob: and data: URLs
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")  # names of the loopback interface

Answer: TypeAlias = Callable[[Request], Awaitable[Response]]


class Board:
    """The current content of the page, and its readers. Everything runs in one event loop."""

    def __init__(self) -> None:
        self.data: Mapping[str, Any] = {}  # the last result of `diloco.watch.page_data.page_data`
        self._readers: set[asyncio.Queue[str]] = set()

    def show(self, data: Mapping[str, Any]) -> None:
        """Replace the content by ``data``, and send the changes to all readers."""
        patch, self.data = difference(self.data, data), data
        if patch:
            message = _message("patch", patch)
            for reader in self._readers:
                if reader.full():  # the reader is too slow for the patches, so it gets the whole content instead
                    while not reader.empty():
                        reader.get_nowait()
                    reader.put_nowait(_message("all", data))
                else:
                    reader.put_nowait(message)

    @property
    def full(self) -> bool:
        """Whether the largest allowed number of readers is connected."""
        return len(self._readers) >= _MOST_READERS

    async def messages(self) -> AsyncIterator[str]:
        """Yield server-sent events for one reader: the whole content, then the changes."""
        reader: asyncio.Queue[str] = asyncio.Queue(maxsize=16)
        self._readers.add(reader)
        try:
            yield _message("all", self.data)
            while True:
                try:
                    yield await asyncio.wait_for(reader.get(), _ALIVE_S)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._readers.discard(reader)


def make_app(
    board: Board,
    *,
    hosts: tuple[str, ...] = LOOPBACK,
    token: str = "",
    port: int = 0,
    on_used: Callable[[str], None] = lambda token: None,
) -> Starlette:
    """Create the web application.

    Args:
        board: the content to serve.
        hosts: the accepted host names, or ``("*",)`` for any. The check prevents DNS rebinding: a page of another site
            can't read this one through a host name that resolves to this address.
        token: the first visitor's token, which counts once: it is exchanged for a cookie. "" accepts all requests.
        port: the port of the page, which is part of the cookie's name, since browsers send cookies to all ports.
        on_used: called with the next visitor's token when a token has been used.
    """
    html, script, style, plotly_path = live_page(), part("watch.js"), part("watch.css"), plotly_script()

    def fixed(content: str, media_type: str) -> Answer:
        body = content.encode()

        async def answer(request: Request) -> Response:
            return Response(body, media_type=media_type)

        return answer

    async def plotly(request: Request) -> Response:  # 5 MB, so it is not kept in memory
        return FileResponse(plotly_path, media_type="text/javascript")

    async def data(request: Request) -> Response:
        return Response(json.dumps(board.data, allow_nan=False), media_type="application/json")

    async def stream(request: Request) -> Response:
        if board.full:
            return PlainTextResponse(f"{_MOST_READERS} pages are already open. Close one of them.", 503)
        return StreamingResponse(board.messages(), media_type="text/event-stream")

    routes = [
        Route("/", fixed(html, "text/html")),
        Route("/watch.js", fixed(script, "text/javascript")),
        Route("/watch.css", fixed(style, "text/css")),
        Route("/plotly.js", plotly),
        Route("/data.json", data),
        Route("/events", stream),
    ]
    middleware = [
        Middleware(_WithHeaders),
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
        Middleware(_WithToken, token=token, cookie=f"diloco-watch-{port}", on_used=on_used),
    ]
    return Starlette(routes=routes, middleware=middleware)


def _message(kind: str, data: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n"


class _WithHeaders:
    """Adds `HEADERS` to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _WithToken:
    """Accepts only requests with the token, once, as ``?token=``, and then with the cookie that it is exchanged for."""

    def __init__(self, app: ASGIApp, token: str, cookie: str, on_used: Callable[[str], None]) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie
        self._on_used = on_used
        self._given: deque[str] = deque(maxlen=_MOST_COOKIES)  # the values of the cookies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._token:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer: ASGIApp
        if any([_same(request.cookies.get(self._cookie, ""), each) for each in self._given]):
            answer = self._app
            if "token" in request.query_params:  # the address was opened again
                answer = RedirectResponse("/", 303)
        elif _same(request.query_params.get("token", ""), self._token):
            self._given.append(secrets.token_urlsafe(16))
            self._token = secrets.token_urlsafe(16)
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, self._given[-1], httponly=True, samesite="strict")
            self._on_used(self._token)
        else:
            answer = PlainTextResponse("This page needs the address that `diloco watch` printed last: /?token=...", 403)
        await answer(scope, receive, send)


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
