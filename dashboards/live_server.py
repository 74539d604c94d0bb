"""`sweep dashboard`'s web server: the standard library's, as there are a few pages, few readers and nothing to post.

Bound to 127.0.0.1 unless told otherwise. A browser may be made to ask it by a page from elsewhere whose name was
pointed at this machine (DNS rebinding): requests must name this machine as their host, which such a page cannot.
"""

from __future__ import annotations

import gzip
import ipaddress
import platform
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dashboards.live_site import HEADERS, Answer, Site
from runners.schema import Exit, UserError

HOST = "127.0.0.1"
DEFAULT_PORT = 8270
WORTH_PACKING = 1400
"""Bytes from which a page is compressed: it may go through a tunnel."""


class Server(ThreadingHTTPServer):
    """Listens at once; `serve_forever` answers. `port` None: DEFAULT_PORT, or any that is free."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, site: Site, host: str = HOST, port: int | None = None) -> None:
        self.site = site
        self.names = {"localhost", host.lower(), platform.node().lower()}
        if port is not None and not 0 <= port <= 65535:
            raise UserError(f"--port {port}: a port is a whole number up to 65535; the default is {DEFAULT_PORT}")
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            text = f"--host {host}: {error.strerror or error}; 127.0.0.1 is this machine alone, 0.0.0.0 everybody"
            raise UserError(text) from error
        self.address_family = found[0]
        address = str(found[4][0])
        try:
            super().__init__((address, DEFAULT_PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None:
                told = f"--port {port} cannot be had on {host}: {error.strerror}; without --port a free one is taken"
                raise UserError(told, Exit.ENVIRONMENT) from error
            super().__init__((address, 0), _Handler)

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        address, port = self.server_address[:2]
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(str(address), str(address))
        return f"http://{f'[{name}]' if ':' in name and '[' not in name else name}:{port}"

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach it."""
        return not ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_loopback

    def allows(self, host: str | None) -> bool:
        """Whether a request's Host header names this machine: by an address, or by one of its names."""
        name = (host or "").strip().lower()
        name = name[1 : name.index("]")] if name.startswith("[") and "]" in name else name.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self.names
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a reader who left is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD; everything else is refused by the base class."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "memsweep", ""
    timeout = 60

    def do_GET(self) -> None:
        if not self.server.allows(self.headers.get("Host")):
            text = "This server answers to localhost, to addresses and to the name of --host, not to this one.\n"
            self._send(Answer(403, "text/plain", text.encode()))
            return
        self._send(self.server.site.answer(self.path))

    do_HEAD = do_GET

    def _send(self, answer: Answer) -> None:
        is_known = answer.status == 200 and self.headers.get("If-None-Match") == answer.tag
        body = b"" if is_known else answer.body
        self.send_response(304 if is_known else answer.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", answer.tag)
        self.send_header("Vary", "Accept-Encoding")
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > WORTH_PACKING:
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        if not is_known:
            self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a page asks every two seconds."""
