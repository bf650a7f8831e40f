"""One request by the wire: what is sent, what comes back whole, cut or broken, and what never leaves."""

from __future__ import annotations

import gzip
import random
import socket
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import brotli
import pytest
import requests

from callqueue import clocks
from callqueue.execution import connection, wire
from callqueue.execution.wire import Answer, Timeouts
from tests.support.busy import BUSY, CHUNKED
from tests.support.peer import (
    HURRIED,
    LOOPBACK,
    PATIENT,
    SECRET,
    Clock,
    Line,
    Names,
    Peer,
    Recording,
    Script,
    answer_bytes,
    answering,
    body_of,
    call,
    echo,
    is_lost,
    limited,
    nothing_was_sent,
    once,
    redirecting,
    within,
    without_end,
)


def test_a_call_comes_back_as_a_requests_response() -> None:
    with Peer(answering(answer_bytes(b'{"id": 7}', Content_Type="application/json"))) as peer:
        before = clocks.monotonic()
        answer = call(peer.url("/v1"), json={"a": 1})
        after = clocks.monotonic()
    response = answer.response
    assert type(response) is requests.Response
    assert (response.status_code, response.reason, response.json()) == (200, "OK", {"id": 7})
    assert (response.url, response.request.method) == (peer.url("/v1"), "POST")
    assert response.headers["content-type"] == "application/json"
    assert 0 < response.elapsed.total_seconds() < after - before
    assert before < answer.sent_at < after
    assert answer == Answer(response, answer.sent_at, sent=True)
    seen = peer.seen[0]
    assert (seen.method, seen.target, seen.body) == ("POST", "/v1", b'{"a": 1}')


TEXTS = ["", "a b", "a+b", "100%", "a%20b%2Fc", "a%2", "a&b=c;d,e", "a/b//c/", "a?b#c", "'a' \"b\"", "[a]{b}<c>|^`",
         "~-._!*()", "äöüß", "a\u0308", "дом", "😀 ok", "\u05d0\u05d1", "a\u200bb", "a\nb", "a\tb", "x" * 8000]  # fmt: skip
NUMBERS = [0, -7, 2**70, 1.0, 0.5, 1 / 3, 1e-7, 5e-324, 1e15, 1e16, 1e22, 3e300, -0.0, True, False]


REQUESTS: list[dict[str, Any]] = [
    {},
    {"params": {"z": TEXTS, "a": NUMBERS, **dict.fromkeys(TEXTS, "v")}},
    {"data": {"z": TEXTS, "a": NUMBERS, **dict.fromkeys(TEXTS, "v")}},
    {"json": {"z": [TEXTS, {"y": 1, "b": 2}], "a": NUMBERS, **dict.fromkeys(TEXTS, "v")}},
    {"params": {"q": "a b", "list": ["1", "2"], "none": None, "ü": "é"}},
    {"params": [["a", "1"], ["a", "2"]]},
    {"params": "raw=1&x"},
    {"json": {"name": "ü", "deep": [1, None, True]}},
    {"json": []},
    {"json": None},
    {"data": {"a": "1", "b": ["2", "3"]}},
    {"data": [["a", "1"], ["b", "ü"]]},
    {"data": "text ü"},
    {"data": ""},
    {"data": {}, "json": {"a": 1}},
    {"headers": {"X-One": "1", "user-agent": "own", "ACCEPT": "text/csv", "Content-Type": "text/x"}, "data": "a"},
    {"headers": {"X-Latin": "é"}},
    {"cookies": {"a": "1", "b": "2"}},
    {"cookies": {"a": "1"}, "headers": {"Cookie": "z=1"}},
    {"auth": ["user", "pässword"]},
    {"auth": ["user", "p"], "headers": {"Authorization": "Bearer x"}},
]  # fmt: skip


@pytest.mark.parametrize("method", ["get", "options", "head", "post", "put", "patch", "delete"])
def test_what_is_sent_is_what_requests_would_send(method: str) -> None:
    with Peer(answering(answer_bytes(b"", "204 No Content"))) as peer:
        url = peer.url("/päth/%41?x=1#fragment")
        for params in REQUESTS:
            with requests.Session() as session:
                session.trust_env = False
                theirs = {**params, "auth": tuple(params["auth"])} if "auth" in params else params
                session.request(method, url, **theirs)
            assert call(url, method, **params).error == ""
            one, other = (
                [*sorted(seen.raw.partition(b"\r\n\r\n")[0].split(b"\r\n")), seen.body]
                for seen in peer.seen[-2:]
            )
            assert other == one, params


def test_nothing_comes_from_the_environment_or_from_another_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password s3cr3t")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with Peer(answering(answer_bytes(Set_Cookie="a=1; Path=/"))) as peer:
        assert call(peer.url()).response.cookies["a"] == "1"
        call(peer.url())
    assert not {"authorization", "cookie"} & peer.seen[1].headers.keys()


def test_ipv6_is_called_by_its_literal() -> None:
    with ExitStack() as stack:
        try:
            peer = stack.enter_context(Peer(answering(echo), address="::1"))
        except OSError:
            pytest.skip("no IPv6 here")
        assert body_of(call(peer.url(), data="x")) == b"x"
        assert peer.seen[0].headers["host"] == f"[::1]:{peer.port}"


def test_a_user_may_put_another_adapter_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the libraries do that test what uses requests."""

    def send(self: Any, request: requests.PreparedRequest, **_: Any) -> requests.Response:
        if "fails" in (request.url or ""):
            raise requests.ConnectTimeout("?token=" + SECRET)
        made_up = requests.Response()
        made_up.status_code, made_up._content, made_up.request = 202, b"made up", request
        return made_up

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    response = call("http://api.example.com/", json={"a": 1}).response
    assert (response.status_code, response.text) == (202, "made up")
    answer = call("http://fails.example.com/")
    assert nothing_was_sent(answer) and answer.error == "ConnectTimeout"


# --- What is refused


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"url": "no-scheme.test/x?token=" + SECRET}, "its URL has no scheme"),
        ({"url": "http:///x?token=" + SECRET}, "its URL is not valid"),
        ({"url": "http://[::1/?token=" + SECRET}, "its URL is not valid"),
        ({"url": "http://127.0.0.1:99999/"}, "not valid"),
        ({"url": "http://127.0.0.1/", "headers": {"X": SECRET + "\r\nY: 1"}}, "one of its headers is not valid"),
        ({"url": "http://127.0.0.1/", "headers": {"X": SECRET + "\u2603"}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "headers": {"X:Y": SECRET}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "headers": {"X": 1}}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "json": {"x": float("nan")}}, "JSON"),
        ({"url": "http://127.0.0.1/", "auth": [SECRET]}, "cannot be made"),
        ({"url": "http://127.0.0.1/", "auth": [SECRET, "\u2603"]}, "cannot be made"),
        ({}, "cannot be made"),
        ({"url": "ftp://127.0.0.1/"}, "must begin with http"),
        ({"url": "file:///etc/passwd"}, "must begin with http"),
        ({"url": "httpx://127.0.0.1/"}, "must begin with http"),
        ({"url": "javascript:alert(1)"}, "must begin with http"),
        ({"url": "data:text/plain,a"}, "must begin with http"),
        ({"url": f"http://me:{SECRET}@127.0.0.1/"}, "contains user:password@"),
    ],
)  # fmt: skip
def test_what_no_request_can_be_made_of_is_refused_without_repeating_it(
    params: dict[str, Any], why: str
) -> None:
    answer = wire.request("get", params, policy=LOOPBACK, timeouts=PATIENT)
    assert nothing_was_sent(answer)
    assert answer.refused
    assert why in answer.error
    assert SECRET not in answer.error


def test_hosts_outside_of_the_allowed_ones_are_refused_without_a_lookup(
    name_is: Callable[..., Names],
) -> None:
    names = name_is(["127.0.0.1"])
    answer = call("http://evil.test/", policy=LOOPBACK._replace(allowed_hosts=("*.good.test",)))
    assert nothing_was_sent(answer) and answer.refused and names.lookups == []
    assert answer.error == "the host evil.test is not in ALLOWED_HOSTS (in this worker's settings)"


# --- Redirects: each is the answer, whatever it says; nothing goes where it points


STATUSES = [300, 301, 302, 303, 304, 305, 307, 308, 399]


NOWHERE = ["/", "", "http://[", "file:///etc/passwd", "http://a\x00b/", "x" * 60_000]


@pytest.mark.parametrize("method", ["get", "head", "post", "put", "patch", "delete", "options"])
def test_a_redirect_is_the_answer(method: str) -> None:
    """Whatever its status, and wherever it points."""
    with Peer(answering(echo)) as other:
        there = other.url("/there")
        moved = [(status, there) for status in STATUSES] + [(302, place) for place in NOWHERE]
        said = [redirecting(place, f"{status} Moved") for status, place in moved]
        with Peer(answering(*said)) as peer:
            for status, place in moved:
                gate = Recording()
                secret = {"Authorization": SECRET}
                answer = call(peer.url("/here"), method, gate=gate, headers=secret)
                assert (answer.error, answer.refused, len(gate.waits)) == ("", False, 1)
                assert answer.response.status_code == status and answer.response.history == []
                assert place != there or answer.response.headers["Location"] == there
            assert len(peer.seen) == len(moved)
        assert other.lines == []


# --- Heads


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints"])
def test_a_few_interim_answers_are_passed_over_and_more_are_no_answer(status: str) -> None:
    interim = f"HTTP/1.1 {status}\r\n\r\n".encode()
    with Peer(answering(interim * connection.MOST_INTERIM + answer_bytes(b"done"))) as peer:
        for _ in range(2):
            assert body_of(call(peer.url())) == b"done"
        assert len(peer.lines) == 1
    with Peer(once(interim * (connection.MOST_INTERIM + 1) + answer_bytes(b"done"))) as peer:
        answer = call(peer.url())
    assert is_lost(answer)
    assert "more than 20 interim answers" in answer.error


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
        response = call(peer.url()).response
    assert (response.encoding, response.text) == (encoding, "ok")


# --- Bodies


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


NOISE = random.Random(8).randbytes(900_000)
LARGE = b"x" * (40 << 20)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"\r\n" + chunked(b"x" * 600_000, 40), b"x" * 600_000),  # streams of events
        (CHUNKED + b"\r\n" + chunked(b"x" * 600_000, 400), b"x" * 600_000),
        (answer_bytes(LARGE), LARGE),
        (answer_bytes(gzip.compress(NOISE), Content_Encoding="gzip"), NOISE),  # it barely folds
        (answer_bytes(gzip.compress(LARGE), Content_Encoding="gzip"), LARGE),
        (answer_bytes(b"as it is", Content_Encoding="zebra"), b"as it is"),
    ],
    ids=[
        "small chunks",
        "larger chunks",
        "large",
        "noise",
        "folds well",
        "a coding that nobody knows",
    ],
)
def test_bodies_of_every_kind_are_read_whole(answer: bytes, body: bytes) -> None:
    with Peer(answering(answer)) as peer:
        got = call(peer.url(), policy=limited(64 << 20))
    assert (body_of(got) == body, got.truncated, got.broken) == (True, False, False)


@pytest.mark.parametrize("encoding", ["", "gzip", "deflate", "br", "gzip, gzip"])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_a_body_is_cut_at_the_limit_counted_as_decoded(encoding: str, framing: str) -> None:
    """And nothing of what was cut is taken for the next answer."""
    body = encoded = random.Random(1).randbytes(500) * 20
    fold = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}
    for name in filter(None, encoding.split(", ")):
        encoded = fold[name](encoded)
    headers = {"Content_Encoding": encoding}
    if framing == "chunked":
        encoded = chunked(encoded, 77)
        headers |= {"Content_Length": "", "Transfer_Encoding": "chunked"}
    elif framing == "close":
        headers |= {"Content_Length": "", "Connection": "close"}
    script = once if framing == "close" else answering
    with Peer(script(answer_bytes(encoded, **headers))) as peer:
        for limit in (5000, 9999, 10_000, 10_001):
            is_truncated, lines = limit < len(body), len(peer.lines)
            answer = call(peer.url(), policy=limited(limit))
            assert body_of(answer) == body[:limit]
            assert (answer.truncated, answer.broken) == (is_truncated, False)
            assert ("cut at" in answer.error) is is_truncated
        assert len(peer.lines) - lines == (framing == "close"), "after a whole one it is kept"


def gigabyte_deflated() -> bytes:
    """A gigabyte of zeros as one deflate stream, from a block that repeats itself."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(b"\0" * (1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first * 64


GZIP = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"
BOMBS: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: GZIP + gigabyte_deflated(),
    "deflate": gigabyte_deflated,
    "br": lambda: brotli.compress(b"\0" * (1 << 27), quality=1),
    "gzip, gzip": lambda: gzip.compress(GZIP + gigabyte_deflated(), 6),
}


@pytest.mark.parametrize("encoding", ["without end", *BOMBS])
def test_a_huge_body_is_bounded_in_memory_and_time(encoding: str) -> None:
    if encoding in BOMBS:
        script = once(answer_bytes(BOMBS[encoding](), Content_Encoding=encoding))
    else:
        script = without_end(CHUNKED + b"\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n")
    with Peer(script) as peer:
        tracemalloc.start()
        try:
            with within(10):
                answer = call(peer.url())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peer.has_closed(1), "while somebody has the answer"
    assert answer.truncated
    assert len(body_of(answer)) == LOOPBACK.max_response_bytes
    assert peak < 12_000_000


IN_CHUNKS = {"Content_Length": "", "Transfer_Encoding": "chunked"}
UNFOLDED = "the body could not be decoded as its Content-Encoding says"


@pytest.mark.parametrize(
    ("data", "body", "why"),
    [
        (answer_bytes(b"half", Content_Length="8"), b"half", "the body broke off"),
        (answer_bytes(b"4\r\nhalf\r\n", **IN_CHUNKS), b"half", "the body broke off"),
        (answer_bytes(b"8\r\nhalf", **IN_CHUNKS), b"half", "the body broke off"),
        (answer_bytes(b"4\r\nhalf\r\nzz\r\n", **IN_CHUNKS), b"half", "the body broke off"),
        (answer_bytes(b"not gzip at all", Content_Encoding="gzip"), b"", UNFOLDED),
    ],
)
def test_a_body_that_breaks_off_is_told_and_kept(data: bytes, body: bytes, why: str) -> None:
    with Peer(once(data)) as peer:
        answer = call(peer.url())
    assert (body_of(answer), answer.error) == (body, why)
    assert (answer.broken, answer.truncated, answer.sent) == (True, False, True)


@pytest.mark.parametrize("encoding", ["br", "gzip, br", "gzip,\tbr", "gzip,BR ", "br\t,gzip"])
def test_brotli_that_cannot_be_bounded_is_not_unfolded(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setitem(wire._UNBOUNDED, "br", "cannot be bounded")
    with Peer(answering(answer_bytes(brotli.compress(b"ok"), Content_Encoding=encoding))) as peer:
        answer = call(peer.url())
        assert peer.has_closed(1), "while somebody has the answer"
    assert (body_of(answer), answer.broken) == (b"", True)


# --- Servers that are slow on purpose: when a call ends, and what it costs until then


def test_time_spent_in_the_gate_counts_against_no_timeout(clock: Clock) -> None:
    def sleep() -> None:
        clock.ahead += 1000

    with Peer(answering(echo)) as peer:
        answer = call(peer.url(), data="x", gate=Recording(sleep))
    assert body_of(answer) == b"x"
    assert answer.response is not None
    assert answer.response.elapsed.total_seconds() < 5


def test_a_timeout_that_is_over_before_the_send_sends_nothing() -> None:
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        time.sleep(0.05)
        url = f"http://127.0.0.1:{full.getsockname()[1]}/"
        answer = call(url, timeouts=Timeouts(connect=0.2, total=5))
    assert nothing_was_sent(answer)
    assert "the connect timeout of 0.2 s" in answer.error
    with Peer(answering(echo)) as peer:
        call(peer.url())
        assert nothing_was_sent(call(peer.url(), timeouts=Timeouts(total=0)))
    assert len(peer.seen) == 1


def test_a_handshake_has_what_connecting_left_of_the_total_timeout(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(socket.socket):
        def connect(self, where: Any) -> None:
            super().connect(where)
            clock.ahead += 59.8

    with Peer(_reads_nothing) as peer, within(4):
        monkeypatch.setattr(socket, "socket", Slow)
        answer = call(f"https{peer.url()[4:]}", timeouts=Timeouts(connect=30, total=60))
    assert nothing_was_sent(answer)
    assert "the total timeout of 60 s" in answer.error


@pytest.mark.parametrize("how", list(BUSY))
def test_a_server_that_keeps_us_busy_costs_half_a_second_of_cpu_at_most(how: str) -> None:
    """This thread's own, on a machine of usual speed; before, it was all of the total timeout."""
    head, piece, why = BUSY[how]
    with Peer(without_end(head, piece)) as peer:
        before = time.thread_time()
        # it may wait for a turn on a machine with other work: only its own time is judged
        answer = call(peer.url(), timeouts=Timeouts(total=60))
        spent = time.thread_time() - before
        assert peer.has_closed(1)
    assert why in answer.error
    assert answer.truncated == (answer.response is not None)
    assert not answer.broken
    assert spent < 0.5 * slowness()


def test_a_long_body_lets_other_threads_have_their_turn_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trip, naps = connection.Trip(PATIENT, wire.Gate(), LOOPBACK), list[float]()
    monkeypatch.setattr(time, "sleep", naps.append)
    for _ in range(2 * connection._SPELL):
        trip.note_read(100)
    assert len(naps) == 2


def slowness() -> float:
    """How many times as long as usual a calculation takes here and now, where it takes longer."""
    before = time.thread_time()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.thread_time() - before) / 0.04)


def _drips(head: bytes, drip: bytes) -> Script:
    def script(line: Line) -> None:
        line.read()
        line.send(head)
        line.drip(drip)

    return script


def _reads_nothing(line: Line) -> None:
    line.peer.closing.wait(5)


def _reads_a_little(line: Line) -> None:
    while not line.peer.closing.wait(0.01) and line.sock.recv(1000):
        pass


DRIP = b"HTTP/1.1 200 OK and so on and on" * 100


@pytest.mark.parametrize(
    ("script", "size"),
    [
        (_drips(b"", DRIP), 1),
        (_drips(b"HTTP/1.1 200 OK\r\n", DRIP), 1),
        (_drips(b"HTTP/1.1 200 OK\r\nX-One: ", DRIP), 1),
        (_reads_nothing, 12_000_000),
        (_reads_a_little, 12_000_000),
    ],
)
def test_a_head_that_drips_or_a_server_that_hardly_reads_ends_with_the_total_timeout(
    script: Script, size: int
) -> None:
    with Peer(script) as peer, within(4):
        answer = call(peer.url(), data="x" * size, timeouts=HURRIED)
    assert is_lost(answer)
    assert "the total timeout of 1 s" in answer.error


IN_PIECES = answer_bytes(b"", Content_Length="", Transfer_Encoding="chunked")
TOTAL, READ = Timeouts(connect=5, read=5, total=1.0), Timeouts(read=0.1)


@pytest.mark.parametrize(
    ("head", "drip", "timeouts", "why"),
    [
        (answer_bytes(b"", Content_Length="10000"), b"x" * 10000, TOTAL, "the total timeout of 1 s"),
        (answer_bytes(b"", Content_Length="", Connection="close"), b"x" * 10000, TOTAL, "the total timeout of 1 s"),
        (IN_PIECES, b"1\r\nx\r\n" * 1000, TOTAL, "the total timeout of 1 s"),
        (IN_PIECES + b"1\r\nx\r\n0\r\n", b"X: y\r\n" * 1000, TOTAL, "the total timeout of 1 s"),
        (answer_bytes(b"x", Content_Length="100"), b"", READ, "the read timeout of 0.1 s"),
    ],
)  # fmt: skip
def test_a_body_that_drips_ends_with_the_total_timeout_and_keeps_what_came(
    head: bytes, drip: bytes, timeouts: Timeouts, why: str
) -> None:
    """One that stalls, with the read timeout."""

    def script(line: Line) -> None:
        _drips(head, drip)(line)
        line.peer.closing.wait(5)

    with Peer(script) as peer, within(5):
        for count in (1, 2):
            answer = call(peer.url(), timeouts=timeouts)
            assert answer.response is not None and answer.response.status_code == 200
            assert (answer.broken, answer.truncated) == (True, False)
            assert body_of(answer).startswith(b"x")
            assert why in answer.error
            assert len(peer.lines) == count
