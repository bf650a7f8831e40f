"""What servers answer that keep whoever calls them busy with what is no answer."""

from __future__ import annotations

import gzip
import random

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
