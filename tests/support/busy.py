"""Servers that keep whoever calls them busy with what is no answer: `python -m tests.support.busy`
serves them all.

GET /0 and on answers with the head of that entry of BUSY and then the same again and again; any
other path soon, with 200. Prints its port, and ends with its standard input.
"""

from __future__ import annotations

import gzip
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n"
GZIPPED = OK + b"Content-Encoding: gzip\r\n\r\n"
EMPTY = gzip.compress(b"")
NOISE = gzip.compress(random.Random(7).randbytes(1 << 20), 1)
MANY, HARDLY = "more than 32768 pieces", "hardly any body"
BUSY = {  # head, what follows without end, and what is said of it
    "a byte a chunk": (CHUNKED + b"\r\n", b"1\r\nx\r\n" * 5000, MANY),
    "a folded byte a chunk": (
        CHUNKED + b"Content-Encoding: gzip\r\n\r\n", b"".join(b"1\r\n%c\r\n" % byte for byte in NOISE), MANY,
    ),
    "long chunks' sizes": (CHUNKED + b"\r\n", b"1;" + b"y" * 60_000 + b"\r\nx\r\n", HARDLY),
    "zeros before chunks' sizes": (CHUNKED + b"\r\n", b"0" * 60_000 + b"1\r\nx\r\n", HARDLY),
    "trailers": (CHUNKED + b"\r\n1\r\nx\r\n0\r\n", b"a: b\r\n" * 10_000, HARDLY),
    "long trailers": (CHUNKED + b"\r\n1\r\nx\r\n0\r\n", b"a: " + b"b" * 60_000 + b"\r\n", HARDLY),
    "nothing, folded": (GZIPPED, EMPTY * 3000, HARDLY),
    "a byte, folded": (GZIPPED, gzip.compress(b"x") * 3000, HARDLY),
    "empty blocks": (GZIPPED + EMPTY[:10], b"\0\0\0\xff\xff" * 10_000, HARDLY),
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000, "interim answers"),
    "long interim answers": (b"", b"HTTP/1.1 103 Hi\r\n" + (b"X: " + b"y" * 60_000 + b"\r\n") * 9 + b"\r\n", HARDLY),
    "headers": (OK, b"X: y\r\n" * 1000, "not HTTP"),
    "long headers": (OK, b"X: " + b"y" * 60_000 + b"\r\n", HARDLY),
    "a header": (OK + b"X: ", b"y" * 60_000, "not HTTP"),
}  # fmt: skip
SOON = 0.02  # seconds that the answers of a normal server take


@contextmanager
def serving() -> Iterator[str]:
    """The address of such a server, in a process of its own: what it takes to be a nuisance is not
    measured with the rest.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Serve until nobody wants it any more."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    with closing(peer), suppress(OSError):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := peer.recv(65536):
            path = request.split(b" ")[1].decode().strip("/")
            if path.isdigit():
                head, piece, _ = list(BUSY.values())[int(path)]
                peer.sendall(head)
                while True:
                    peer.sendall(piece)
            time.sleep(SOON)
            peer.sendall(OK + b"Content-Length: 2000\r\n\r\n" + b"x" * 2000)


if __name__ == "__main__":
    main()
