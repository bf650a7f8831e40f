"""The wire: makes one HTTP request, bounded in time, bytes and reach, and tells how far it got.
requests composes, urllib3's pools keep connections for a moment. Never retries, never follows a
redirect, keeps no cookies, reads no proxies or passwords from the environment, and never raises for
what a network or a server did.
"""

from __future__ import annotations

import os
import queue
import ssl
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from http.client import HTTPException
from typing import Any, cast

import requests
import urllib3.response
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH, default_headers
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import DecodeError, HTTPError
from urllib3.response import BaseHTTPResponse
from urllib3.util.ssl_ import create_urllib3_context

from callqueue.clocks import Mono
from callqueue.execution.connection import (
    HERE,
    IDLE_SECONDS,
    Connection,
    Dropped,
    Failed,
    Flooded,
    Gate,
    Policy,
    Refused,
    SecureConnection,
    Starved,
    Timeouts,
    Trip,
    monotonic,
)
from callqueue.execution.starvation import why_starved
from callqueue.security.addresses import Place, Unreadable, place_of, place_refusal
from callqueue.texts import codec_of

__all__ = ["Answer", "Dropped", "Gate", "Policy", "Timeouts", "close_idle_connections", "request"]

_PIECE = 65536
MOST_POOLS = 64  # places to which connections are kept
_LONGEST_KEPT = 500  # characters of a URL that is remembered as it is prepared
_FOLDED_PIECE = 8192  # of what is compressed: unfolding one keeps other threads waiting
_TELLING: dict[type[Exception], str] = {
    requests.exceptions.MissingSchema: "its URL has no scheme",
    requests.exceptions.InvalidURL: "its URL is not valid",
    requests.exceptions.InvalidHeader: "one of its headers is not valid",
    requests.exceptions.InvalidJSONError: "its JSON holds something that JSON has no form for",
}


@dataclass
class Answer:
    """How far the call got, and what came back, its body read and bounded."""

    response: requests.Response | None = field(repr=False)
    sent_at: Mono | None
    # why there is no response, or why its body is not whole; holds no query string and no header
    error: str = ""
    sent: bool = False  # any byte of a request may have reached the network
    refused: bool = False  # by policy, for good: nothing arrived at the refused place
    truncated: bool = False  # the body was cut at max_response_bytes
    broken: bool = False  # the body broke off, or ran past a timeout
    dropped: bool = False  # the gate raised Dropped, or this process lacks what a call takes
    starved: bool = False  # dropped, since this process lacks that


def request(
    method: str,
    params: Mapping[str, Any],
    *,
    policy: Policy,
    timeouts: Timeouts,
    gate: Gate | None = None,
) -> Answer:
    """Make the call: `params` as for requests.request. Raises what the gate does, but Dropped."""
    gate = Gate() if gate is None else gate
    trip, answer, may_be_sent = Trip(timeouts, gate, policy), Answer(None, None), False
    try:
        _send(_prepared_request(method, params), trip, answer)
    except Failed as failure:
        answer.error, answer.refused = str(failure), isinstance(failure, Refused)
    except Dropped as dropped:
        answer.error, answer.dropped = str(dropped) or "dropped before it was sent", True
        answer.starved = isinstance(dropped, Starved)
    except requests.RequestException as error:  # only of an adapter that a test put in our place
        answer.error = type(error).__name__
        may_be_sent = not isinstance(error, requests.ConnectTimeout)
    answer.sent, answer.sent_at = may_be_sent or gate.sent_at is not None, gate.sent_at
    return answer


# --- Composing


def _prepared_request(method: str, params: Mapping[str, Any]) -> requests.PreparedRequest:
    """The request, without a session's cookies and hooks. Refused where none can be made."""
    prepared = requests.PreparedRequest()
    headers = {name.lower(): (name, value) for name, value in (params.get("headers") or {}).items()}
    headers = _DEFAULT_HEADERS | headers
    cookies, auth = params.get("cookies"), params.get("auth")
    try:
        prepared.prepare_method(method)
        if params.get("params") or len(params["url"]) > _LONGEST_KEPT:
            prepared.prepare_url(params["url"], params.get("params"))
        else:
            prepared.url = _prepared_url(params["url"])
        # None takes a default header away
        prepared.prepare_headers({n: value for n, value in headers.values() if value is not None})
        if cookies:
            prepared.prepare_cookies(cookies)
        prepared.prepare_body(params.get("data"), None, params.get("json"))
        if auth:
            prepared.prepare_auth(tuple(auth))
    except (requests.RequestException, ValueError, TypeError, KeyError) as error:
        # a reason of our own: the error's text may repeat a secret
        why = _TELLING.get(type(error), type(error).__name__)
        raise Refused(f"the request cannot be made: {why}") from None
    return prepared


@lru_cache(maxsize=256)
def _prepared_url(url: str) -> str | None:
    prepared = requests.PreparedRequest()
    prepared.prepare_url(url, None)
    return prepared.url


def _checked_place(url: str, policy: Policy) -> Place:
    try:
        place = place_of(url)
    except Unreadable as error:
        raise Refused(f"the URL {error}") from None
    if why := place_refusal(place, policy.allowed_hosts, policy.allowed_networks):
        raise Refused(f"{why} {HERE}")
    return place


# --- Pools of connections, kept for a moment


class _Idle(deque[Connection]):
    """Idle connections, the one that was used last at the end. Any thread may put and get."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()

    def put(self, connection: Connection, block: bool = False) -> None:
        if connection.sock is not None:
            self.append(connection)

    def get(self, block: bool = False, timeout: float | None = None) -> Connection:
        try:
            return self.pop()
        except IndexError:
            raise queue.Empty from None

    def close_idle_since(self, instant: float) -> None:
        with suppress(IndexError):
            while self[0].idle_since < instant:
                self.popleft().close()


class _Pool(HTTPConnectionPool):
    """Connections to one place under one policy: a reused one's address is not checked anew."""

    ConnectionCls = Connection
    QueueCls = _Idle  # type: ignore[assignment]

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, body: Any = None, headers: Any = None, **_: Any
    ) -> BaseHTTPResponse:
        """What requests asks of a pool: send, and come back with the head of the answer."""
        connection: Any = self._get_conn()  # a live one, or a new one
        connection.trip = this_thread.trip
        try:
            connection.request(method, url, body, headers, preload_content=False)
            response: Any = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        response._connection, response._pool = connection, self  # which release it at its end
        return cast(BaseHTTPResponse, response)

    def _put_conn(self, conn: Any) -> None:
        if conn.is_whole:
            # It is answered, so it has arrived; and what this connection knows is the next one's.
            del conn.trip.gate.has_arrived
        else:
            conn.close()
        del conn.trip
        conn.idle_since = monotonic()
        super()._put_conn(conn)


class _SecurePool(_Pool, HTTPSConnectionPool):
    ConnectionCls = SecureConnection


this_thread = threading.local()  # the `trip` and the `place` of its request
_pools: dict[tuple[Place, bool | str, tuple[str, ...]], _Pool] = {}


def pool_of(place: Place, policy: Policy) -> _Pool:
    key = (place, policy.verify, policy.allowed_networks)
    pool = _pools.get(key)
    if pool is None:
        pool = _pools.setdefault(key, _new_pool(place, policy.verify))
        with suppress(KeyError, RuntimeError):  # another thread does so
            while len(_pools) > MOST_POOLS:
                del _pools[next(iter(_pools))]
    return pool


def close_idle_connections(seconds: float = IDLE_SECONDS) -> None:
    """Close the connections that are idle for so long: no call takes them, each is a descriptor."""
    for pool in list(_pools.values()):
        cast(_Idle, pool.pool).close_idle_since(monotonic() - seconds)


def _new_pool(place: Place, verify: bool | str) -> _Pool:
    if place.scheme == "https":
        return _SecurePool(place.host, place.port, maxsize=0, ssl_context=_tls_context(verify))
    return _Pool(place.host, place.port, maxsize=0)


@lru_cache(maxsize=64)
def _tls_context(verify: bool | str) -> ssl.SSLContext:
    """One per `verify`: reading certificates takes long. Failed, Starved: they cannot be read."""
    context = create_urllib3_context()
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    where = DEFAULT_CA_BUNDLE_PATH if verify is True else verify
    try:
        context.load_verify_locations(**{"capath" if os.path.isdir(where) else "cafile": where})
    except OSError as error:
        if want := why_starved(error):
            raise Starved(want) from None
        why = error.strerror or error
        raise Failed(f"the certificates to trust cannot be read from {where}: {why}") from None
    return context


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # the parent's connections are the parent's


# --- Sending


class _Adapter(HTTPAdapter):
    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> Any:
        return pool_of(this_thread.place, this_thread.trip.policy)

    def cert_verify(self, *_: Any, **__: Any) -> None:
        """Do nothing: the connection's own context verifies."""

    def request_url(self, request: requests.PreparedRequest, proxies: Any) -> str:
        return request.path_url

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        """As requests's, but looks for cookies only where some are set: it takes a jar, mocks."""
        if "set-cookie" in resp.headers:
            return super().build_response(req, resp)
        original, resp._original_response = resp._original_response, None
        try:
            return super().build_response(req, resp)
        finally:
            resp._original_response = original


_session = requests.Session()
_session.trust_env = False
_session.mount("http://", _Adapter(max_retries=0))
_session.mount("https://", _Adapter(max_retries=0))


def _send(prepared: requests.PreparedRequest, trip: Trip, answer: Answer) -> None:
    """Send it, and read the response, with its body, into `answer`, as far as it came."""
    url = prepared.url or ""
    this_thread.place, this_thread.trip = _checked_place(url, trip.policy), trip
    began = monotonic()
    try:
        # a test may have put an adapter in ours' place
        response = _session.get_adapter(url).send(
            prepared, stream=True, verify=trip.policy.verify, proxies={}
        )
    finally:
        del this_thread.trip
    seconds = monotonic() - began - trip.in_gate  # without time in the gate
    response.elapsed = timedelta(seconds=seconds)
    # what a hook reads as text is looked up by no name of the server's
    if response.encoding is not None:
        response.encoding = codec_of(response.encoding)
    _read_body(response, trip, answer)
    answer.response = response


# --- The body


def _read_body(response: requests.Response, trip: Trip, answer: Answer) -> None:
    """Read it into the response, bounded; `answer` says what was cut or broke off."""
    raw, limit = response.raw, trip.policy.max_response_bytes
    response._content_consumed = True  # type: ignore[attr-defined]
    if raw is None:  # an answer that a test has made up
        response._content = (response.content or b"")[:limit]
        return
    pieces, is_whole = list[bytes](), False
    try:
        while trip.kept <= limit and (piece := _next_piece(raw, limit - trip.kept + 1)):
            pieces.append(piece)
            trip.kept += len(piece)
        is_whole = trip.kept <= limit
        answer.truncated = not is_whole
        answer.error = "" if is_whole else f"the body was cut at {limit} bytes"
    except Flooded as flood:
        answer.truncated, answer.error = True, f"the body was cut: {flood}"
    except (HTTPError, HTTPException, OSError, ValueError) as failure:
        answer.broken, answer.error = True, _why_broken(failure, trip)
    finally:
        if not is_whole:
            raw.close()
    content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    response._content = content[:limit]


def _next_piece(raw: Any, wanted: int) -> bytes:
    """`wanted` bytes at most, once there are some; none at the end: the connection goes back."""
    encoding = raw.headers.get("content-encoding")
    if raw.length_remaining == 0 and (encoding is None or not raw.tell()):
        if raw.tell():
            return b""
        encoding = None  # an empty body is whole, whatever its encoding
    for name in _codings(encoding or ""):
        if name in _UNBOUNDED:
            raise DecodeError(_UNBOUNDED[name])
    most = _PIECE if encoding is None else _FOLDED_PIECE
    piece: bytes = raw.read1(min(wanted, most), decode_content=encoding is not None)
    return piece


def _why_broken(error: Exception, trip: Trip) -> str:
    timeouts = trip.timeouts
    if trip.ends_at <= monotonic() or TimeoutError in (type(error), type(error.__cause__)):
        return f"the body was not whole within {trip.why_late('read', timeouts.read)}"
    if isinstance(error, DecodeError):
        return "the body could not be decoded as its Content-Encoding says"
    return "the body broke off"


def _is_brotli_bounded() -> bool:
    """Whether the Brotli that urllib3 uses, if any, can be told where to stop: from 1.2 on."""
    brotli = getattr(urllib3.response, "brotli", None)
    try:
        return (
            brotli is None or brotli.Decompressor().process(b"", output_buffer_limit=1) is not None
        )
    except (TypeError, AttributeError):
        return False


def _codings(listed: str) -> list[str]:
    return [name.strip() for name in listed.lower().split(",")]


# What is neither asked for nor unfolded: Zstandard's own window may be 128 MB, whatever is taken
# out of it at once.
_UNBOUNDED = {}
if getattr(urllib3.response, "HAS_ZSTD", False):
    _UNBOUNDED["zstd"] = "Zstandard's window has no bound of ours"
if not _is_brotli_bounded():
    _UNBOUNDED["br"] = "Brotli before 1.2 cannot unfold a bounded part"
ACCEPT_ENCODING = ", ".join(
    name for name in _codings(default_headers()["Accept-Encoding"]) if name not in _UNBOUNDED
)
# User-Agent and the others that requests sends, by their names in lower case
_DEFAULT_HEADERS = {
    name.lower(): (name, value)
    for name, value in {**default_headers(), "Accept-Encoding": ACCEPT_ENCODING}.items()
}
