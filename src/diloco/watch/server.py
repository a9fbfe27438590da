"""The page over HTTP: read-only, and live by server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import json
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

_COOKIE = "diloco-watch"
_ALIVE_S = 15.0  # a comment is sent after so much silence, so that a reader who has left is noticed

_MOST_READERS = 32

# plotly.js writes styles of its own into the page, and makes pictures of curves by way of blob: and data:
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

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")  # names of this machine for itself

Answer: TypeAlias = Callable[[Request], Awaitable[Response]]


class Board:
    """What the page shows now, for everybody who looks. In one event loop."""

    def __init__(self) -> None:
        self.data: Mapping[str, Any] = {}  # as `diloco.watch.page_data.page_data` made it last
        self._readers: set[asyncio.Queue[str]] = set()

    def show(self, data: Mapping[str, Any]) -> None:
        """Show ``data`` from now on; readers are sent what has changed."""
        patch, self.data = difference(self.data, data), data
        if patch:
            message = _message("patch", patch)
            for reader in self._readers:
                if reader.full():  # too slow for all the changes: it gets everything at once instead
                    while not reader.empty():
                        reader.get_nowait()
                    reader.put_nowait(_message("all", data))
                else:
                    reader.put_nowait(message)

    @property
    def full(self) -> bool:
        """Whether as many are looking as may."""
        return len(self._readers) >= _MOST_READERS

    async def messages(self) -> AsyncIterator[str]:
        """Server-sent events: everything, and from then on what changes."""
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


def make_app(board: Board, *, hosts: tuple[str, ...] = LOOPBACK, token: str = "") -> Starlette:
    """The application.

    Args:
        hosts: names by which it may be asked for, so that no other site's page can read it by a name of its own for
            this address; ``("*",)``: any.
        token: who comes without it is turned away; "": everybody may look.
    """
    html, script, style, plotly_path = live_page(), part("watch.js"), part("watch.css"), plotly_script()

    def fixed(content: str, media_type: str) -> Answer:
        body = content.encode()

        async def answer(request: Request) -> Response:
            return Response(body, media_type=media_type)

        return answer

    async def plotly(request: Request) -> Response:  # 5 MB, which are not held
        return FileResponse(plotly_path, media_type="text/javascript")

    async def data(request: Request) -> Response:
        return Response(json.dumps(board.data, allow_nan=False), media_type="application/json")

    async def stream(request: Request) -> Response:
        if board.full:
            return PlainTextResponse(f"{_MOST_READERS} pages are open already. Close one of them.", 503)
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
        Middleware(_WithToken, token=token),
    ]
    return Starlette(routes=routes, middleware=middleware)


def _message(kind: str, data: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n"


class _WithHeaders:
    """Adds `HEADERS` to every answer."""

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
    """Lets those in who know the token: as ``?token=`` once, and by a cookie from then on."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._token:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer: ASGIApp
        if self._right(request.cookies.get(_COOKIE, "")):
            answer = self._app
        elif self._right(request.query_params.get("token", "")):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
        else:
            answer = PlainTextResponse("This page needs the token that `diloco watch` has printed: /?token=...", 403)
        await answer(scope, receive, send)

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
