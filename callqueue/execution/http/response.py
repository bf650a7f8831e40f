"""An answer is read here: its head and its body, within the deadline, in bounded memory and work.

A socket and a deadline enter; a head leaves, then a decoded body and why it is not whole. Never
unfolds what cannot be unfolded in bounded parts.
"""

from __future__ import annotations

import io
import socket
from http.client import HTTPException, HTTPResponse, parse_headers
from typing import Any, NamedTuple

import requests
import urllib3.response
from requests.utils import default_headers
from urllib3.exceptions import DecodeError, HTTPError
from urllib3.response import BaseHTTPResponse

from callqueue.execution.http.deadline import Deadline, now
from callqueue.execution.http.errors import Flooded

MOST_INTERIM = 20  # interim answers (100, 102, 103) before the one that counts
_PIECE = 65536
_FOLDED_PIECE = 8192  # of what is compressed: unfolding one keeps other threads waiting


# --- Codings


def _is_brotli_bounded() -> bool:
    """Whether the Brotli that urllib3 uses, if any, can be told where to stop: from 1.2 on."""
    brotli = getattr(urllib3.response, "brotli", None)
    try:
        return (
            brotli is None or brotli.Decompressor().process(b"", output_buffer_limit=1) is not None
        )
    except (TypeError, AttributeError):
        return False


# What is neither asked for nor unfolded: Zstandard's own window may be 128 MB, whatever is taken
# out of it at once.
_UNBOUNDED = {}
if getattr(urllib3.response, "HAS_ZSTD", False):
    _UNBOUNDED["zstd"] = "Zstandard's window has no bound of ours"
if not _is_brotli_bounded():
    _UNBOUNDED["br"] = "Brotli before 1.2 cannot unfold a bounded part"


def _codings(listed: str) -> list[str]:
    """The names in a list of codings, as urllib3 reads them."""
    return [name.strip() for name in listed.lower().split(",")]


ACCEPT_ENCODING = ", ".join(
    name for name in _codings(default_headers()["Accept-Encoding"]) if name not in _UNBOUNDED
)


# --- The head


class BoundedReader(io.RawIOBase):
    """A socket's reading side. No read waits past the deadline, so a slow drip ends with it."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline
        # keeps the socket open for as long as the body is read
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks of a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left(self._deadline.timeouts.read))
        count: int | None = self._raw.readinto(buffer)
        self._deadline.took(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class Head(HTTPResponse):
    """An answer as http.client reads it, which passes over every interim one (100, 102, 103), not
    over 100 alone. Flooded after MOST_INTERIM of them.
    """

    deadline: Deadline
    _interim = 0

    def _read_status(self) -> tuple[str, int, str]:
        while True:
            status: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
            if status[1] == 101 or status[1] >= 200:
                return status
            self._interim += 1
            if self._interim > MOST_INTERIM:
                raise Flooded(f"more than {MOST_INTERIM} interim answers came")
            if status[1] == 100:  # whose headers http.client passes over itself
                return status
            parse_headers(self.fp)

    def read1(self, n: int = -1) -> bytes:
        self.deadline.turn()
        return super().read1(n)


# --- The body


class Body(NamedTuple):
    """A decoded body, as far as it was read. `error` says why that is not all of it."""

    content: bytes
    error: str = ""
    truncated: bool = False  # cut at max_response_bytes, or because the server flooded us
    broken: bool = False  # broke off, ran past a timeout, or could not be decoded

    def __repr__(self) -> str:
        return f"<a body of {len(self.content)} bytes>"

    @property
    def is_whole(self) -> bool:
        return not (self.truncated or self.broken)


def read_body(response: requests.Response, limit: int, deadline: Deadline) -> Body:
    """The decoded body, at most `limit` bytes of it."""
    raw = response.raw
    if raw is None:  # an answer that a test has made up
        return Body((response.content or b"")[:limit])
    pieces: list[bytes] = []
    size, error, truncated, broken = 0, "", False, False
    try:
        while size <= limit and (piece := _next_piece(raw, limit - size + 1)):
            pieces.append(piece)
            size += len(piece)
            deadline.unfolded += len(piece)
    except Flooded as flood:
        truncated, error = True, f"the body was cut: {flood}"
    except (HTTPError, HTTPException, OSError, ValueError) as failure:
        broken, error = True, _why_broken(failure, deadline)
    if size > limit:
        truncated, error = True, f"the body was cut at {limit} bytes"
    if truncated or broken:
        raw.close()
    content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Body(content[:limit], error, truncated, broken)


def _next_piece(raw: BaseHTTPResponse, wanted: int) -> bytes:
    """Up to `wanted` decoded bytes, as soon as there are some; none at the end."""
    encoding = raw.headers.get("content-encoding")
    if raw.length_remaining == 0 and (encoding is None or not raw.tell()):
        raw.close()  # an empty body is whole, whatever its encoding
        return b""
    for name in _codings(encoding or ""):
        if name in _UNBOUNDED:
            raise DecodeError(_UNBOUNDED[name])
    most = _PIECE if encoding is None else _FOLDED_PIECE
    return raw.read1(min(wanted, most), decode_content=True)


def _why_broken(error: Exception, deadline: Deadline) -> str:
    if deadline.at <= now() or TimeoutError in (type(error), type(error.__cause__)):
        return f"the body was not whole within {deadline.why_late('read', deadline.timeouts.read)}"
    if isinstance(error, DecodeError):
        return "the body could not be decoded as its Content-Encoding says"
    return "the body broke off"
