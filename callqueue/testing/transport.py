"""The testing kit's network: requests that are answered here, and kept for a test to look at."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import urlsplit

from callqueue import clocks
from callqueue.testing.answers import as_answer, is_unsent

if TYPE_CHECKING:
    from callqueue.execution.http import client

active_transports: list[FakeTransport] = []  # of the blocks that we are in, the innermost last


class UnexpectedRequest(AssertionError):
    """A call was made that the test has no answer for."""


@dataclass(frozen=True)
class Request:
    """A request as it would have gone out. `url` has the query; `json` is the body where it is
    JSON; `headers` know no case.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    params: Mapping[str, Any] = field(repr=False)

    @property
    def json(self) -> Any:
        """The body, read as JSON; None where it is none."""
        try:
            return jsonlib.loads(self.body)
        except ValueError:
            return None

    @property
    def idempotency_key(self) -> str | None:
        """The Idempotency-Key header."""
        return self.headers.get("Idempotency-Key")


class FakeTransport:
    """Answers in place of the network. `requests` are those made so far, oldest first.

    `answers` maps what a request must match to its answer; the first that matches answers. A
    pattern is a URL, with `*` for any text, in front of it a method where only that is meant ("POST
    https://..."), a compiled regular expression, or a callable that takes the Request. A pattern
    without "?" is matched without the query. An answer is a status, a dict or list (200 and that
    JSON), text, (status, headers, body), `answer(...)`, an exception of requests or any other to be
    raised, or a callable that takes the Request and returns one of these.
    """

    def __init__(self, answers: Mapping[Any, Any] | None = None, *, default: Any = None) -> None:
        self.answers: dict[Any, Any] = dict(answers or {})
        self.default = default
        self.requests: list[Request] = []
        self._unexpected: list[UnexpectedRequest] = []

    def add(self, pattern: Any, answer: Any = 200) -> None:
        """Answer requests that match with this from now on, before what was there."""
        self.answers = {pattern: answer, **{k: v for k, v in self.answers.items() if k != pattern}}

    def check(self) -> None:
        """Raise the UnexpectedRequest of a call that had no answer, if there was one."""
        if self._unexpected:
            raise self._unexpected.pop(0)

    def request(
        self, method: str, params: Any, *, policy: Any, timeouts: Any, gate: Any = None
    ) -> client.Answer:
        """What stands in for callqueue.execution.http.client.request."""
        from callqueue.execution.http import client

        made = _as_request(method, params)
        given = self._answer_for(made)
        try:
            (gate or client.Gate()).wait()
        except client.Dropped as dropped:
            return client.Answer(None, None, error=str(dropped), dropped=True)
        sent_at = clocks.monotonic()
        if gate is not None and not is_unsent(given):
            gate.sent_at = sent_at
        self.requests.append(made)
        if callable(given) and not isinstance(given, type):
            given = given(made)
        return as_answer(made, given, sent_at)

    def _answer_for(self, made: Request) -> Any:
        for pattern, given in self.answers.items():
            if _matches(pattern, made):
                return given
        if self.default is not None:
            return self.default
        known = "".join(f"\n  {pattern}" for pattern in self.answers) or " none"
        error = UnexpectedRequest(
            f"no answer for {made.method} {made.url}; fake_transport has:{known}"
        )
        self._unexpected.append(error)
        raise error


class NoTransport(FakeTransport):
    """What stands in where a test has no transport: requests to this machine go out, to a server of
    the test's own, and no other does.
    """

    def __init__(self) -> None:
        from callqueue.execution.http import client

        super().__init__()
        self._real = client.request

    def request(
        self, method: str, params: Any, *, policy: Any, timeouts: Any, gate: Any = None
    ) -> client.Answer:
        host = urlsplit(params["url"]).hostname or ""
        if _is_this_machine(host):
            return self._real(method, params, policy=policy, timeouts=timeouts, gate=gate)
        error = UnexpectedRequest(
            f"{method.upper()} to {host}: run_callqueue() makes no request that leaves this "
            "machine; give the answer with the fixture callqueue_transport or fake_transport({...})"
        )
        self._unexpected.append(error)
        raise error


@contextmanager
def without_network() -> Iterator[None]:
    """Requests go to the innermost transport, another stand-in, or no further than here."""
    from callqueue.execution.http import client

    if active_transports or client.request.__module__ != client.__name__:
        yield
        return
    transport = NoTransport()
    active_transports.append(transport)
    try:
        with mock.patch.object(client, "request", transport.request):
            yield
    finally:
        active_transports.remove(transport)


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def fake_transport(
    answers: Mapping[Any, Any] | None = None, *, default: Any = None
) -> Iterator[FakeTransport]:
    """No call reaches the network meanwhile: these answer. `default` answers what no pattern
    matches; else that is an error.

    See FakeTransport for patterns and answers.
    """
    from callqueue.execution.http import client

    transport = FakeTransport(answers, default=default)
    active_transports.append(transport)
    try:
        with mock.patch.object(client, "request", transport.request):
            yield transport
        transport.check()
    finally:
        active_transports.remove(transport)


def _as_request(method: str, params: Mapping[str, Any]) -> Request:
    import requests

    auth = params.get("auth")
    prepared = requests.Request(
        method.upper(),
        params["url"],
        params=params.get("params"),
        data=params.get("data"),
        json=params.get("json"),
        headers=params.get("headers"),
        cookies=params.get("cookies"),
        auth=tuple(auth) if auth else None,
    ).prepare()
    body = prepared.body or b""
    sent = body.encode() if isinstance(body, str) else bytes(body)
    return Request(prepared.method or "", prepared.url or "", prepared.headers, sent, dict(params))


def _matches(pattern: Any, made: Request) -> bool:
    if callable(pattern):
        return bool(pattern(made))
    if isinstance(pattern, re.Pattern):
        return pattern.search(made.url) is not None
    method, _, url = str(pattern).rpartition(" ")
    return (not method or method.upper() == made.method) and is_url(url, made.url)


def is_url(pattern: str, url: str) -> bool:
    """Whether a URL is the pattern's; without its query where the pattern has none."""
    if "?" not in pattern:
        url = url.partition("?")[0]
        if url.endswith("/") and url.count("/") == 3 and pattern.count("/") == 2:
            pattern += "/"
    wanted = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(wanted, url, re.DOTALL) is not None
