"""The HTTP wire: makes one request, bounded in time, bytes and reach, and tells exactly how far it
got.

Params as requests.request takes them enter, with what may be called and how long it may take; an
Answer leaves. The address that was checked is the one that is connected to. Never retries, never
keeps cookies between calls, never reads proxies or passwords from the environment, and never raises
for what a network or a server did.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3.response
from requests.utils import default_headers
from urllib3.exceptions import DecodeError, HTTPError
from urllib3.response import BaseHTTPResponse

from callqueue.execution.http.adapter import close_idle, this_thread
from callqueue.execution.http.deadline import (
    Dropped,
    Failed,
    Flooded,
    Gate,
    Journey,
    Policy,
    Refused,
    Target,
    Timeouts,
    now,
    refuse_to_compose,
)
from callqueue.security.addresses import host_refusal, literal_address, refusal
from callqueue.security.scrubbing import holds
from callqueue.texts import charset

__all__ = ["Answer", "Dropped", "Gate", "Policy", "Timeouts", "close_idle", "request"]

LONGEST_AUTHORITY = 300  # characters of a host and its port: a name has at most 253
_PIECE = 65536
_FOLDED_PIECE = 8192  # of what is compressed: unfolding one keeps other threads waiting


@dataclass
class Answer:
    """How far the call got, and what came back, its body read and bounded."""

    response: requests.Response | None
    sent_at: float | None
    # why there is no response, or why its body is not whole; holds no query string and no header
    error: str = ""
    sent: bool = False  # any byte of a request may have reached the network
    refused: bool = False  # by policy, for good: nothing arrived at the refused place
    truncated: bool = False  # the body was cut at max_response_bytes
    broken: bool = False  # the body broke off, or ran past a timeout
    dropped: bool = False  # the gate raised Dropped
    # how many were followed; perhaps one of them never got as far as the network
    redirects: int = 0


def request(
    method: str,
    params: Mapping[str, Any],
    *,
    policy: Policy,
    timeouts: Timeouts,
    gate: Gate | None = None,
) -> Answer:
    """Make the call. `params`: url, params, data, json, headers, cookies, auth, as requests.request
    takes them.

    The response is the last one: a 3xx where redirects are not followed, or where the next hop is
    refused. Whatever the gate raises besides Dropped is raised.
    """
    journey = Journey(policy, timeouts, Gate() if gate is None else gate)
    answer = Answer(None, None)
    try:
        _travel(journey, _prepared(method, params), answer)
    except Failed as failure:
        answer.error, answer.refused = str(failure), failure.is_final
    except Dropped as dropped:
        answer.error, answer.dropped = str(dropped) or "dropped before it was sent", True
    except (
        requests.RequestException
    ) as error:  # only from an adapter that a test has put in place of ours
        answer.error = type(error).__name__
        journey.is_sent = journey.is_sent or not isinstance(error, requests.ConnectTimeout)
    answer.sent, answer.sent_at = journey.is_sent, journey.gate.sent_at
    return answer


# --- Composing


def _is_brotli_bounded() -> bool:
    """Whether the Brotli that urllib3 has found, if any, can be told where to stop: 1.2 and later
    can.
    """
    brotli = getattr(urllib3.response, "brotli", None)
    try:
        return (
            brotli is None or brotli.Decompressor().process(b"", output_buffer_limit=1) is not None
        )
    except (TypeError, AttributeError):
        return False


_IS_BROTLI_BOUNDED = _is_brotli_bounded()
_DEFAULT_HEADERS = dict(default_headers())  # User-Agent and what can be decoded, as requests has it
# What is neither asked for nor unfolded: Zstandard's own window may be 128 MB, whatever is taken
# out of it at once.
_UNBOUNDED = {}
if getattr(urllib3.response, "HAS_ZSTD", False):
    _UNBOUNDED["zstd"] = "Zstandard's window has no bound of ours"
if not _IS_BROTLI_BOUNDED:
    _UNBOUNDED["br"] = "Brotli before 1.2 cannot unfold a bounded part"


def _codings(listed: str) -> list[str]:
    """The names in a list of codings, as urllib3 reads them."""
    return [name.strip() for name in listed.lower().split(",")]


_DEFAULT_HEADERS["Accept-Encoding"] = ", ".join(
    name for name in _codings(_DEFAULT_HEADERS["Accept-Encoding"]) if name not in _UNBOUNDED
)


def _prepared(method: str, params: Mapping[str, Any]) -> requests.PreparedRequest:
    """As requests would prepare it, without a session's cookies, hooks and environment."""
    prepared = requests.PreparedRequest()
    headers = params.get("headers")
    cookies = params.get("cookies")
    auth = params.get("auth")
    try:
        prepared.prepare_method(method)
        prepared.prepare_url(params["url"], params.get("params"))
        prepared.prepare_headers(
            _DEFAULT_HEADERS | _without_none(headers) if headers else _DEFAULT_HEADERS
        )
        if cookies:
            prepared.prepare_cookies(cookies)
        prepared.prepare_body(params.get("data"), None, params.get("json"))
        if auth:
            prepared.prepare_auth(tuple(auth))
    except (requests.RequestException, ValueError, TypeError, KeyError) as error:
        refuse_to_compose(error)
    return prepared


def _without_none(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in headers.items() if value is not None}


# --- Travelling


def _travel(journey: Journey, prepared: requests.PreparedRequest, answer: Answer) -> None:
    """Hop until there is an answer that is not followed. The answer holds how far this got,
    whatever is raised.
    """
    history: list[requests.Response] = []
    while True:
        target = _check(prepared.url, journey.policy, is_redirected=bool(history))
        answer.response, answer.truncated, answer.broken, answer.error = None, False, False, ""
        answer.redirects = len(history)
        response = answer.response = _hop(journey, target, prepared, answer)
        response.history = list(history)
        location = _location(response) if journey.policy.redirects else None
        if location is None:
            return
        if len(history) == journey.policy.redirects:
            answer.error = f"more than {len(history)} redirects; the last one was not followed"
            return
        history.append(response)
        prepared = _redirected(prepared, response, location, journey.policy)


def _check(url: str | None, policy: Policy, *, is_redirected: bool) -> Target:
    """Refuse whatever can be refused without resolving the name."""
    parts = urlsplit(url or "")
    found: Target | str = "the URL has no host that can be read"
    if (
        len(parts.scheme) + len(parts.netloc) <= LONGEST_AUTHORITY
    ):  # no cache keeps what a stranger makes as long as he likes
        found = _target(parts.scheme, parts.netloc, policy.allowed_hosts, policy.allowed_networks)
    if (
        is_redirected
        and isinstance(found, Target)
        and host_refusal(found.host, policy.closed_hosts) is None
    ):
        found = f"the host {found.host} is another rule's, with limits of its own"
    if isinstance(found, str):
        raise Refused(f"a redirect was not followed: {found}" if is_redirected else found)
    return found


@lru_cache(maxsize=1024)
def _target(
    scheme: str, netloc: str, hosts: Sequence[str], networks: Sequence[str]
) -> Target | str:
    """Where to connect, or why not."""
    if scheme not in ("http", "https"):
        return (
            f"the scheme {scheme[:20]!r} is neither http nor https"
            if scheme
            else "the URL has no scheme"
        )
    if "@" in netloc:
        return "the URL holds a user or a password; use auth"
    try:
        parts = urlsplit(f"//{netloc}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host:
        return "the URL has no host that can be read"
    address = literal_address(host)
    port = port if port is not None else 443 if scheme == "https" else 80
    why = host_refusal(host, hosts, port) or (
        refusal(address, networks) if address is not None else None
    )
    if why is not None:
        return why
    return Target(scheme, host if address is None else str(address), port)


def _hop(
    journey: Journey, target: Target, prepared: requests.PreparedRequest, answer: Answer
) -> requests.Response:
    """One request and its answer, the body read. The adapter is ours, unless a test has put another
    in its place.
    """
    session, door = this_thread()
    policy, timeouts = journey.policy, journey.timeouts
    began, in_gate = now(), journey.in_gate
    door.enter(journey, target)
    try:
        adapter = session.get_adapter(prepared.url or "")
        response = adapter.send(
            prepared,
            stream=True,
            timeout=(timeouts.connect, timeouts.read),
            verify=policy.verify,
            proxies={},
        )
        response.elapsed = timedelta(seconds=now() - began - (journey.in_gate - in_gate))
        if (
            response.encoding is not None
        ):  # what a hook reads as text is looked up by no name of the server's
            response.encoding = charset(response.encoding)
        response._content = _read(response, journey, answer)
        response._content_consumed = True  # type: ignore[attr-defined]
        if not (answer.truncated or answer.broken):
            door.keep(response)
    finally:
        door.leave()
    return response


# --- Redirects


_CREDENTIAL = re.compile(
    r"auth|cookie|token|secret|key|credential|passw|passphrase|session|sign|jwt|bearer|csrf|xsrf|saml|assertion"
    r"|otp$|^host$",
    re.IGNORECASE,
)
_CREDENTIAL_VALUE = re.compile(
    r"(bearer|basic|token|digest|negotiate|apikey|hmac\S*|aws4\S*)\s", re.IGNORECASE
)
_OF_THE_BODY = (
    "Content-Length",
    "Content-Type",
    "Content-Encoding",
    "Content-Language",
    "Transfer-Encoding",
)


def _location(response: requests.Response) -> str | None:
    """Where the answer redirects to: bytes that HTTP reads as Latin-1 and servers write as
    UTF-8.
    """
    if not response.is_redirect:
        return None
    location = response.headers["location"]
    try:
        return location.encode("latin-1").decode("utf-8") or None
    except ValueError:
        return location or None


def _redirected(
    prepared: requests.PreparedRequest, response: requests.Response, location: str, policy: Policy
) -> requests.PreparedRequest:
    """The request of the next hop, without what only the origin of this one may know."""
    onward = prepared.copy()
    method = _method_after(response.status_code, prepared.method or "GET")
    if method != prepared.method:
        onward.method, onward.body = method, None
        for name in _OF_THE_BODY:
            onward.headers.pop(name, None)
    try:
        onward.prepare_url(urljoin(response.url, location), None)
    except (requests.RequestException, ValueError):
        raise Refused("the redirect's target is not a URL that can be called") from None
    if not _is_same_origin(prepared.url or "", onward.url or ""):
        _leave_secrets(onward, policy)
    return onward


def _leave_secrets(onward: requests.PreparedRequest, policy: Policy) -> None:
    """Take what is secret out of a request to another origin; Refused where it cannot be taken out,
    or may go nowhere else.
    """
    if policy.is_bound:
        raise Refused(
            "a redirect was not followed: it leads to another origin, and a secret of the call is bound to its places"
        )
    for name, value in list(onward.headers.items()):
        text = _text(value)
        if _CREDENTIAL.search(name) or _CREDENTIAL_VALUE.match(text) or holds(text, policy.secrets):
            del onward.headers[name]
    body = onward.body.decode("utf-8", "replace") if isinstance(onward.body, bytes) else onward.body
    if isinstance(body, str) and holds(body, policy.secrets):
        raise Refused(
            "a redirect was not followed: it leads to another origin, and the body holds a secret"
        )


def _method_after(status: int, method: str) -> str:
    """RFC 9110 section 15.4, as browsers and requests have it: a POST is not repeated unless 307 or
    308 says so.
    """
    if status in (302, 303) and method != "HEAD":
        return "GET"
    return "GET" if status == 301 and method == "POST" else method


def _is_same_origin(one: str, other: str) -> bool:
    """Same scheme, host and port; from http to https on their default ports counts as the same, as
    in requests.
    """
    before, after = _origin(one), _origin(other)
    return before == after or (
        before == ("http", after[1], 80) and after == ("https", before[1], 443)
    )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        return "", None, None
    return (
        parts.scheme,
        parts.hostname,
        port if port is not None else {"http": 80, "https": 443}.get(parts.scheme),
    )


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


# --- Reading the body


def _read(response: requests.Response, journey: Journey, answer: Answer) -> bytes:
    """The decoded body, at most max_response_bytes of it; the answer says where that is not all."""
    raw, limit = response.raw, journey.policy.max_response_bytes
    if raw is None:  # an answer that a test has made up
        return (response.content or b"")[:limit]
    pieces: list[bytes] = []
    size = 0
    try:
        while size <= limit and (piece := _next_piece(raw, limit - size + 1)):
            pieces.append(piece)
            size += len(piece)
            journey.unfolded += len(piece)
    except Flooded as flood:
        answer.truncated, answer.error = True, f"the body was cut: {flood}"
    except (HTTPError, HTTPException, OSError, ValueError) as error:
        answer.broken, answer.error = True, _why_broken(error, journey)
    if size > limit:
        answer.truncated, answer.error = True, f"the body was cut at {limit} bytes"
    if answer.truncated or answer.broken:
        raw.close()
    return (pieces[0] if len(pieces) == 1 else b"".join(pieces))[:limit]


def _next_piece(raw: BaseHTTPResponse, wanted: int) -> bytes:
    """Up to `wanted` decoded bytes, as soon as there are some; none at the end. What is compressed
    unfolds bounded.
    """
    encoding = raw.headers.get("content-encoding")
    if raw.length_remaining == 0 and (encoding is None or not raw.tell()):
        raw.close()  # an empty body is whole, whatever its encoding
        return b""
    for name in _codings(encoding or ""):
        if name in _UNBOUNDED:
            raise DecodeError(_UNBOUNDED[name])
    return raw.read1(
        min(wanted, _PIECE if encoding is None else _FOLDED_PIECE), decode_content=True
    )


def _why_broken(error: Exception, journey: Journey) -> str:
    if journey.deadline <= now() or TimeoutError in (type(error), type(error.__cause__)):
        return f"the body was not whole within {journey.why_late('read', journey.timeouts.read)}"
    if isinstance(error, DecodeError):
        return "the body could not be decoded as its Content-Encoding says"
    return "the body broke off"
