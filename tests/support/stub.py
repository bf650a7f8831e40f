"""A provider on this machine for clients under permits: a server in a thread of the test, which
answers as a function says. What a test is to judge by is `seen`: the paths that were asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# from a path, without its query, and how often it was asked for by now: status, headers, body
Answers = Callable[[str, int], tuple[int, Mapping[str, str], bytes]]


@dataclass
class Stub:
    """Its address, and the paths that were asked for, in order."""

    url: str
    seen: list[str] = field(default_factory=list)


@contextmanager
def serving(answers: Answers) -> Iterator[Stub]:
    """A stub that answers so, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            stub.seen.append(path)
            status, headers, body = answers(path, stub.seen.count(path))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub = Stub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
