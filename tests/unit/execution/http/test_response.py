"""Bodies of every framing and coding: read whole, cut, broken off, and bounded in memory."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from dataclasses import replace

import brotli
import pytest

from callqueue.execution import connection, wire
from tests.support.busy import CHUNKED
from tests.support.peer import (
    LOOPBACK,
    Line,
    Peer,
    answer_bytes,
    answering,
    body_of,
    call,
    is_lost,
    limited,
    once,
    within,
)


def test_interim_answers_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    with Peer(answering(interim + answer_bytes(b"done"))) as peer:
        assert body_of(call(peer.url())) == b"done"
        assert body_of(call(peer.url())) == b"done"
        assert len(peer.lines) == 1


@pytest.mark.parametrize("size", [40, 400])
def test_bodies_in_small_chunks_are_read_whole(size: int) -> None:
    """As streams of events are: some tens of bytes each."""
    count = 600_000 // size
    chunk = b"%x\r\n" % size + b"x" * size + b"\r\n"
    with Peer(answering(CHUNKED + b"\r\n" + chunk * count + b"0\r\n\r\n")) as peer:
        answer = call(peer.url())
    assert (len(body_of(answer)), answer.truncated, answer.broken) == (size * count, False, False)


def test_a_large_body_is_never_too_many_pieces() -> None:
    body = b"x" * (40 << 20)
    with Peer(answering(answer_bytes(body))) as peer:
        answer = call(peer.url(), policy=replace(LOOPBACK, max_response_bytes=64 << 20))
    assert (len(body_of(answer)), answer.truncated) == (len(body), False)


def test_text_that_barely_folds_is_read_whole() -> None:
    noise = random.Random(8).randbytes(900_000)
    with Peer(answering(answer_bytes(gzip.compress(noise), Content_Encoding="gzip"))) as peer:
        answer = call(peer.url())
    assert (body_of(answer) == noise, answer.truncated) == (True, False)


@pytest.mark.parametrize(
    ("claimed", "encoding"),
    [
        ("text/html; charset=Shift_JIS", "shift-jis"),
        ("text/html; charset=undefined", "utf-8"),
        ("text/html; charset=utf-7", "utf-8"),
        ("text/html; charset=" + "x" * 5000, "utf-8"),
        ("text/html", "latin-1"),
        ("image/png", None),
    ],
)
def test_a_hook_reads_text_by_no_name_of_the_servers(claimed: str, encoding: str | None) -> None:
    with Peer(answering(answer_bytes(b"ok", Content_Type=claimed))) as peer:
        answer = call(peer.url())
    assert answer.response is not None
    assert answer.response.encoding == encoding
    assert answer.response.text == "ok"


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints"])
def test_a_few_interim_answers_are_passed_over_and_more_are_no_answer(status: str) -> None:
    interim = f"HTTP/1.1 {status}\r\n\r\n".encode()
    with Peer(answering(interim * connection.MOST_INTERIM + answer_bytes(b"done"))) as peer:
        assert body_of(call(peer.url())) == b"done"
    with Peer(once(interim * (connection.MOST_INTERIM + 1) + answer_bytes(b"done"))) as peer:
        answer = call(peer.url())
    assert is_lost(answer)
    assert "more than 20 interim answers" in answer.error


@pytest.mark.parametrize("encoding", ["", "gzip", "deflate", "br", "gzip, gzip"])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize(
    ("limit", "is_truncated"), [(5000, True), (9999, True), (10000, False), (10001, False)]
)
def test_a_body_is_cut_at_the_limit_counted_as_decoded(
    encoding: str, framing: str, limit: int, is_truncated: bool
) -> None:
    body = random.Random(1).randbytes(500) * 20
    encoded = body
    for name in filter(None, encoding.split(", ")):
        encoded = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}[name](
            encoded
        )
    headers = {"Content_Encoding": encoding}
    if framing == "chunked":
        pieces = [encoded[at : at + 77] for at in range(0, len(encoded), 77)]
        encoded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        headers |= {"Content_Length": "", "Transfer_Encoding": "chunked"}
    elif framing == "close":
        headers |= {"Content_Length": "", "Connection": "close"}
    script = once if framing == "close" else answering
    with Peer(script(answer_bytes(encoded, **headers))) as peer:
        answer = call(peer.url(), policy=limited(limit))
        assert body_of(answer) == body[:limit]
        assert (answer.truncated, answer.broken) == (is_truncated, False)
        assert ("cut at" in answer.error) is is_truncated
        assert body_of(call(peer.url(), policy=limited(limit))) == body[:limit]
        assert is_truncated or len(peer.lines) == (2 if framing == "close" else 1)


def test_a_body_without_end_is_bounded_in_memory_and_time() -> None:
    def script(line: Line) -> None:
        line.read()
        line.send(answer_bytes(b"", Content_Length="", Transfer_Encoding="chunked"))
        while True:
            line.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    with Peer(script) as peer:
        assert_bounded(peer)


def gigabyte_deflated() -> bytes:
    """A gigabyte of zeros as one deflate stream, from a block that repeats itself."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(b"\0" * (1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first * 64


BOMBS = {
    "gzip": lambda: b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + gigabyte_deflated(),
    "deflate": gigabyte_deflated,
    "br": lambda: brotli.compress(b"\0" * (1 << 27), quality=1),
    "gzip, gzip": lambda: gzip.compress(
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + gigabyte_deflated(), 6
    ),
}


@pytest.mark.parametrize("encoding", list(BOMBS))
def test_a_small_body_that_unfolds_into_a_huge_one_is_bounded_in_memory_and_time(
    encoding: str,
) -> None:
    with Peer(once(answer_bytes(BOMBS[encoding](), Content_Encoding=encoding))) as peer:
        assert_bounded(peer)


def assert_bounded(peer: Peer) -> None:
    tracemalloc.start()
    try:
        with within(10):
            answer = call(peer.url())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.truncated
    assert len(body_of(answer)) == LOOPBACK.max_response_bytes
    assert peak < 12_000_000


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (answer_bytes(b"half", Content_Length="8"), b"half"),
        (answer_bytes(b"4\r\nhalf\r\n", Content_Length="", Transfer_Encoding="chunked"), b"half"),
        (answer_bytes(b"8\r\nhalf", Content_Length="", Transfer_Encoding="chunked"), b"half"),
        (
            answer_bytes(b"4\r\nhalf\r\nzz\r\n", Content_Length="", Transfer_Encoding="chunked"),
            b"half",
        ),
    ],
)
def test_a_body_that_breaks_off_is_told_and_kept(data: bytes, whole: bytes) -> None:
    with Peer(once(data)) as peer:
        answer = call(peer.url())
    assert body_of(answer) == whole
    assert (answer.broken, answer.truncated, answer.sent) == (True, False, True)
    assert answer.error == "the body broke off"


def test_a_body_that_is_not_encoded_as_it_says_is_broken() -> None:
    with Peer(answering(answer_bytes(b"not gzip at all", Content_Encoding="gzip"))) as peer:
        answer = call(peer.url())
    assert answer.broken
    assert "Content-Encoding" in answer.error


@pytest.mark.parametrize("encoding", ["br", "gzip, br", "gzip,\tbr", "gzip,BR ", "br\t,gzip"])
def test_brotli_that_cannot_be_bounded_is_not_unfolded(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setitem(wire._UNBOUNDED, "br", "cannot be bounded")
    with Peer(answering(answer_bytes(brotli.compress(b"ok"), Content_Encoding=encoding))) as peer:
        answer = call(peer.url())
    assert (body_of(answer), answer.broken) == (b"", True)


def test_an_encoding_nobody_knows_is_left_as_it_is() -> None:
    with Peer(answering(answer_bytes(b"as it is", Content_Encoding="zebra"))) as peer:
        assert body_of(call(peer.url())) == b"as it is"
