"""The page as one self-contained file, and a read-only HTTP server, which every open page asks again and again."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import hmac
import importlib.util
import re
import secrets
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, Self
from urllib.parse import parse_qs

from diloco.errors import ConfigurationError

MAX_CONNECTIONS = 64
MAX_THREADS = 2 * MAX_CONNECTIONS  # those of connections that were hung up on take a moment to end
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")  # names of the loopback interface

# plotly.js adds inline styles to the page, and exports images of curves through blob: and data: URLs
POLICY = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def export_page(data: bytes) -> str:
    """Return the page with ``data`` in it, a result of `diloco.watch.page_data`, as one HTML file that loads nothing.

    Without data, the page asks the server that has sent it.

    Raises:
        ConfigurationError: if plotly is not installed.

    >>> page = export_page(b'{"runs": [{"name": "</script><script>alert(1)</script>"}]}')
    >>> "</script><script>alert" in page
    False
    """
    html, style, script = (
        (files("diloco.watch") / "page" / f"watch.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    package = importlib.util.find_spec("plotly")  # which is not imported
    plotly = Path(package.origin if package and package.origin else "").parent / "package_data" / "plotly.min.js"
    if not plotly.is_file():
        raise ConfigurationError("`diloco watch` needs plotly. Install it with: pip install 'diloco[watch]'.")
    scripts = [script, plotly.read_text("utf-8").replace("</script", "<\\/script")]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    policy = POLICY.format(hashes=" ".join(f"'sha256-{digest}'" for digest in hashes))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{style}</style>'
    # without "<", no text in the data, such as a sample, can end the element that holds it
    text = data.decode().replace("<", "\\u003c")
    body = f'<script type="application/json" id="data">{text}</script>\n' if data else ""
    body += "".join(f"<script>{code}</script>\n" for code in scripts)
    return html.replace("<!-- head -->", head).replace("<!-- scripts -->", body)


class LocalServer(ThreadingTCPServer):
    """A read-only server of this process, which answers in threads within a ``with`` block.

    Args:
        host: the address to listen at. At a loopback address, only requests for its names are answered: a page of
            another site can't read this one through a host name that resolves to this address (DNS rebinding).
        port: the port to listen at; 0 for any.
        handler: the class of its answers.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[LocalHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)
        self.host, self.port = host, int(self.server_address[1])
        self.is_local = host in LOOPBACK
        self._open: dict[socket.socket, None] = {}  # connections, the oldest first
        self._places = threading.Semaphore(MAX_THREADS)
        self._has_failed = False

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.1,), name="diloco-server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread. If there are too many connections, hang up on the oldest, however little it says.

        If there are too many threads, or the system starts no more, hang up on this one.
        """
        self._open[request] = None
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            self._open.pop(oldest, None)
            with contextlib.suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)  # its thread then closes it
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let another connection have the thread's place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that a reader has gone; print the traceback of the first other error, as anyone may cause many."""
        if not isinstance(sys.exc_info()[1], OSError) and not self._has_failed:
            self._has_failed = True
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Answers one request of a `LocalServer`."""

    server: LocalServer
    server_version, sys_version = "diloco", ""
    timeout = 60.0  # seconds to receive a line, or to send a whole answer

    def answer(self) -> None:
        """Answer a request for ``path``."""
        raise NotImplementedError

    def do_GET(self) -> None:
        if self.server.is_local and re.sub(r":\d*$", "", self.headers.get("Host", "")) not in LOOPBACK:
            self.send(400, b"This host name is not known here.")
        else:
            self.answer()

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send an answer; a name of a header has underscores."""
        self.send_response(status)
        for name, value in {"Content_Type": "text/plain", "Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():  # also of errors
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing about requests."""


class PageServer(LocalServer):
    """Serves the page within a ``with`` block to browsers that know its token, which they then have as a cookie."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, _Handler)
        self.token = secrets.token_urlsafe(16)
        self.content: dict[str, tuple[str, bytes, str]] = {}  # path -> type, compressed content, and its entity tag
        self.show(export_page(b"").encode(), "/", "text/html; charset=utf-8")
        self.show(b"{}")

    def show(self, content: bytes, path: str = "/data.json", kind: str = "application/json") -> None:
        """Replace the content at a path, by default a result of `diloco.watch.page_data`."""
        self.content[path] = kind, gzip.compress(content, 1, mtime=0), f'"{hashlib.sha256(content).hexdigest()}"'


class _Handler(LocalHandler):
    server: PageServer

    def answer(self) -> None:
        (path, _, query), right = self.path.partition("?"), self.server.token
        cookie = f"diloco-watch-{self.server.port}"  # browsers send cookies to all ports
        cookies = dict(pair.strip().partition("=")[::2] for pair in self.headers.get("Cookie", "").split(";"))
        token = parse_qs(query).get("token", [""])[0]
        if not hmac.compare_digest((token or cookies.get(cookie, "")).encode(), right.encode()):
            self.send(403, b"This page needs the address that `diloco watch` has printed: /?token=...")
        elif token:
            self.send(303, Location="/", Set_Cookie=f"{cookie}={right}; HttpOnly; SameSite=Lax; Path=/")
        else:
            self._show(path)

    def _show(self, path: str) -> None:
        kind, content, tag = self.server.content.get(path, ("", b"", ""))
        if not kind:
            self.send(404, b"There is no such page.")
        elif tag in self.headers.get("If-None-Match", ""):  # a list, perhaps of weakened tags
            self.send(304, ETag=tag)
        else:
            packed = {"Content_Encoding": "gzip"} if "gzip" in self.headers.get("Accept-Encoding", "gzip") else {}
            body = content if packed else gzip.decompress(content)
            self.send(200, body, Content_Type=kind, ETag=tag, **packed)
