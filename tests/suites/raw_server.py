"""An HTTP server that keeps the bytes of every request, and redirects where the path says so."""

from __future__ import annotations

import socketserver
import threading
from collections import defaultdict
from typing import Any


class RawServer(socketserver.ThreadingTCPServer):
    """`with RawServer() as server`: requests are in `server.taken()`, by the first part of their
    path, in the order of their arrival.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port = int(self.server_address[1])
        self._kept: dict[str, list[bytes]] = defaultdict(list)
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        self.server_close()

    def keep(self, request: bytes) -> None:
        target = request.split(b"\r\n", 1)[0].split(b" ")[1]
        place = target.lstrip(b"/").replace(b"?", b"/").replace(b";", b"/").split(b"/")[0]
        self._kept[place.decode("latin-1").strip()].append(request)

    def taken(self) -> dict[str, list[bytes]]:
        """What came since this was asked last."""
        kept, self._kept = self._kept, defaultdict(list)
        return dict(kept)


class _Connection(socketserver.StreamRequestHandler):
    server: RawServer
    timeout = 20

    def handle(self) -> None:
        while (request := self._read()) is not None:
            self.server.keep(request)
            self.wfile.write(self._answer(request))

    def _read(self) -> bytes | None:
        head = b""
        try:
            while line := self.rfile.readline():
                head += line
                if line == b"\r\n":
                    return head + self._body(head.lower())
        except (OSError, ValueError):  # it broke off, or its framing is none
            pass
        return None

    def _body(self, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" in head:
            body = b""
            while line := self.rfile.readline():
                body += line
                if line.strip() == b"0":
                    return body + self.rfile.readline()
                body += self.rfile.read(int(line, 16) + 2)
            return body
        length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip()
        return self.rfile.read(int(length or 0))

    def _answer(self, request: bytes) -> bytes:
        target = request.split(b" ", 2)[1].decode("latin-1").partition("?")[0]
        parts = target.strip("/").split("/")
        if len(parts) < 3 or not parts[1].isdigit():
            return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        place, code, where = parts[:3]
        port = self.server.port
        location = {
            "here": f"http://127.0.0.1:{port}/{place}?after=1",
            "relative": f"/{place}/x?after=1",
            "fragment": f"/{place}#part",
            "umlauts": f"/{place}/%C3%BC",
            "twice": f"/{place}/302/here",
            "elsewhere": f"http://localhost:{port}/{place}",
            "cookie": f"/{place}",
            "user": f"http://u:p@127.0.0.1:{port}/{place}",
        }[where]
        cookie = "Set-Cookie: set=1; Path=/\r\n" if where == "cookie" else ""
        text = f"HTTP/1.1 {code} Moved\r\nLocation: {location}\r\n{cookie}Content-Length: 0\r\n\r\n"
        return text.encode("latin-1")
