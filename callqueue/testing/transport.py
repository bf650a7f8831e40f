"""The testing kit's network: requests that are answered here, and kept for a test to look at."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from http.client import responses
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import urlsplit

from callqueue import clocks
from callqueue.clocks import Mono

if TYPE_CHECKING:
    import requests

    from callqueue.execution import wire

active_transports: list[FakeTransport] = []  # of the blocks that we are in, the innermost last


class UnexpectedRequest(AssertionError):
    """A call was made that the test has no answer for."""


@dataclass(frozen=True)
class Request:
    """A request as it would have gone out. `url` has the query; `headers` know no case."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        try:
            return jsonlib.loads(self.body)
        except ValueError:
            return None

    @property
    def idempotency_key(self) -> str | None:
        return self.headers.get("Idempotency-Key")


class FakeTransport:
    """Answers in place of the network. `requests` are those made so far, oldest first.

    `answers` maps what a request must match to its answer; the first that matches answers. A
    pattern is a URL, with `*` for any text, in front of it a method where only that is meant ("POST
    https://..."); or a function of the Request. One without "?" is matched without the query. An
    answer is a status, a dict (200 and that JSON), `answer(...)`, an exception to be raised, a
    function that takes the Request and returns one of these, or a list of these: one after the
    other, the last one for ever. An assertion that fails in such a function fails the test.

    Without any answer, requests to this machine are really made, to a server of the test's own.
    """

    def __init__(self, answers: Mapping[Any, Any] | None = None, *, default: Any = None) -> None:
        from callqueue.execution import wire

        self.answers: dict[Any, Any] = dict(answers or {})
        self.default = default
        self.requests: list[Request] = []
        self._real = wire.request
        # by the id of an answer that is a list: it, and what is left of it
        self._left: dict[int, tuple[list[Any], list[Any]]] = {}
        self._failed: list[AssertionError] = []

    def add(self, pattern: Any, answer: Any = 200) -> None:
        """Answer requests that match with this from now on, before what was there."""
        self.answers = {pattern: answer, **{k: v for k, v in self.answers.items() if k != pattern}}

    def check(self) -> None:
        """Raise an AssertionError of a request, once: its call took it for a failed attempt."""
        if self._failed:
            raise self._failed.pop(0)

    def request(
        self, method: str, params: Any, *, policy: Any, timeouts: Any, gate: Any = None
    ) -> wire.Answer:
        if not self.answers and self.default is None and _is_this_machine(params["url"]):
            return self._real(method, params, policy=policy, timeouts=timeouts, gate=gate)
        try:
            return self._answer_request(_prepared_request(method, params), gate)
        except AssertionError as error:
            self._failed.append(error)
            raise

    def _answer_request(self, made: Request, gate: Any) -> wire.Answer:
        from callqueue.execution import wire

        given, gate = self._answer_for(made), gate or wire.Gate()
        try:
            gate.wait()
        except wire.Dropped as dropped:
            return wire.Answer(None, None, error=str(dropped), dropped=True)
        sent_at = clocks.monotonic()
        if not _fails_unsent(given):
            gate.sent_at = sent_at
        self.requests.append(made)
        if callable(given) and not isinstance(given, type):
            given = given(made)
        return _to_wire_answer(given, made.url, sent_at)

    def _answer_for(self, made: Request) -> Any:
        known = (given for pattern, given in self.answers.items() if _matches(pattern, made))
        given = next(known, self.default)
        if given is not None:
            return self._next_answer(given)
        # a URL may hold a secret, which nobody expected here
        target = made.url if self.answers else urlsplit(made.url).hostname
        listed = "".join(f"\n  {pattern}" for pattern in self.answers) or " none"
        raise UnexpectedRequest(
            f"no answer for {made.method} {target}: a test makes no request that leaves this "
            "machine; give the answer with the fixture callqueue_transport or "
            f"fake_transport({{...}}), which has:{listed}"
        )

    def _next_answer(self, given: Any) -> Any:
        if not isinstance(given, list) or not given:
            return given
        # the list is kept beside its copy: its id is nobody else's meanwhile
        _, left = self._left.setdefault(id(given), (given, list(given)))
        return left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def fake_transport(
    answers: Mapping[Any, Any] | None = None, *, default: Any = None
) -> Iterator[FakeTransport]:
    """No call reaches the network meanwhile: these answer (see FakeTransport). `default` answers
    what no pattern matches; else that is an error.
    """
    from callqueue.execution import wire

    transport = FakeTransport(answers, default=default)
    active_transports.append(transport)
    try:
        with mock.patch.object(wire, "request", transport.request):
            yield transport
        transport.check()
    finally:
        active_transports.remove(transport)


@contextmanager
def without_network() -> Iterator[None]:
    """Requests go to a transport or other stand-in; where none is, no further than this machine."""
    from callqueue.execution import wire

    if active_transports or wire.request.__module__ != wire.__name__:
        yield
    else:
        with fake_transport():
            yield


def answer(
    status: int = 200,
    *,
    json: Any = None,
    body: str | bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> requests.Response:
    """An answer for `fake_transport`: a status, and JSON or a body."""
    import requests
    from requests.utils import get_encoding_from_headers

    response = requests.Response()
    if json is not None:
        response.headers["Content-Type"] = "application/json"
        body = jsonlib.dumps(json)
    response.headers.update(headers or {})
    response.status_code, response.reason = status, responses.get(status, "")
    response._content = body.encode() if isinstance(body, str) else body
    response.encoding = get_encoding_from_headers(response.headers)
    return response


def _to_wire_answer(given: Any, url: str, sent_at: Mono) -> wire.Answer:
    import requests

    from callqueue.execution import wire

    given = given() if isinstance(given, type) else given
    if isinstance(given, requests.RequestException):
        why = f"{type(given).__name__}: {given}".rstrip(": ")
        sent = not _fails_unsent(given)
        return wire.Answer(None, sent_at if sent else None, error=why, sent=sent)
    if isinstance(given, BaseException):
        raise given
    response = copy(_as_response(given))
    response.url = url
    return wire.Answer(response, sent_at, sent=True)


def _fails_unsent(given: Any) -> bool:
    import requests

    kind = given if isinstance(given, type) else type(given)
    lost = (requests.exceptions.ReadTimeout, requests.exceptions.ChunkedEncodingError)
    return issubclass(kind, requests.RequestException) and not issubclass(kind, lost)


def _as_response(given: Any) -> requests.Response:
    import requests

    if isinstance(given, requests.Response):
        return given
    if isinstance(given, dict):
        return answer(json=given)
    if isinstance(given, int) and not isinstance(given, bool):
        return answer(given)
    raise UnexpectedRequest(f"{given!r} is no answer: see callqueue.testing.FakeTransport")


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _prepared_request(method: str, params: Mapping[str, Any]) -> Request:
    import requests

    composed = {name: params.get(name) for name in ("params", "data", "json", "headers", "cookies")}
    auth = tuple(params["auth"]) if params.get("auth") else None
    made = requests.Request(method.upper(), params["url"], auth=auth, **composed).prepare()
    body = made.body or b""
    sent = body.encode() if isinstance(body, str) else bytes(body)
    return Request(made.method or "", made.url or "", made.headers, sent)


def _matches(pattern: Any, made: Request) -> bool:
    if callable(pattern):
        return bool(pattern(made))
    method, _, url = pattern.rpartition(" ")
    return method.upper() in ("", made.method) and url_matches(url, made.url)


def url_matches(pattern: str, url: str) -> bool:
    """Whether it fits the pattern (`*`: any text); without its query where the pattern has none."""
    if "?" not in pattern:
        url = url.partition("?")[0]
        if url.endswith("/") and url.count("/") == 3 and pattern.count("/") == 2:
            pattern += "/"
    wanted = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(wanted, url, re.DOTALL) is not None
