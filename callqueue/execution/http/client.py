"""The HTTP client: makes one request, bounded in time, bytes and reach, and tells exactly how far
it got.

Params as requests.request takes them enter, with what may be called and how long it may take; an
Answer leaves. The address that was checked is the one that is connected to. Never retries, never
keeps cookies between calls, never reads proxies or passwords from the environment, and never raises
for what a network or a server did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import requests
from requests.utils import default_headers

from callqueue.execution.http.adapter import close_idle, this_thread
from callqueue.execution.http.deadline import Deadline, now
from callqueue.execution.http.errors import Dropped, Failed, Starved, refuse_to_compose
from callqueue.execution.http.policy import Gate, Policy, Timeouts
from callqueue.execution.http.response import ACCEPT_ENCODING, read_body
from callqueue.execution.http.target import target_of
from callqueue.texts import charset

__all__ = ["Answer", "Dropped", "Gate", "Policy", "Timeouts", "close_idle", "request"]

# User-Agent and the others that requests sends, by their names in lower case
_DEFAULT_HEADERS = {
    name.lower(): (name, value)
    for name, value in {**default_headers(), "Accept-Encoding": ACCEPT_ENCODING}.items()
}


@dataclass
class Answer:
    """How far the call got, and what came back, its body read and bounded."""

    response: requests.Response | None = field(repr=False)
    sent_at: float | None
    # why there is no response, or why its body is not whole; holds no query string and no header
    error: str = ""
    sent: bool = False  # any byte of a request may have reached the network
    refused: bool = False  # by policy, for good: nothing arrived at the refused place
    truncated: bool = False  # the body was cut at max_response_bytes
    broken: bool = False  # the body broke off, or ran past a timeout
    dropped: bool = False  # the gate raised Dropped, or this process lacks what a call takes
    starved: bool = False  # the latter


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

    A redirect is an answer like any other: none is followed. Whatever the gate raises besides
    Dropped is raised.
    """
    gate = Gate() if gate is None else gate
    deadline = Deadline(timeouts, gate)
    answer = Answer(None, None)
    may_be_sent = False
    try:
        _send(_prepared(method, params), policy, deadline, answer)
    except Failed as failure:
        answer.error, answer.refused = str(failure), failure.is_final
    except Dropped as dropped:
        answer.error, answer.dropped = str(dropped) or "dropped before it was sent", True
        answer.starved = isinstance(dropped, Starved)
    except requests.RequestException as error:  # only of an adapter that a test put in our place
        answer.error = type(error).__name__
        may_be_sent = not isinstance(error, requests.ConnectTimeout)
    answer.sent, answer.sent_at = may_be_sent or gate.sent_at is not None, gate.sent_at
    return answer


def _prepared(method: str, params: Mapping[str, Any]) -> requests.PreparedRequest:
    """As requests would prepare it, without a session's cookies, hooks and environment. A header
    that is None takes the default one away.
    """
    prepared = requests.PreparedRequest()
    headers = {name.lower(): (name, value) for name, value in (params.get("headers") or {}).items()}
    headers = _DEFAULT_HEADERS | headers
    cookies, auth = params.get("cookies"), params.get("auth")
    try:
        prepared.prepare_method(method)
        prepared.prepare_url(params["url"], params.get("params"))
        prepared.prepare_headers({n: value for n, value in headers.values() if value is not None})
        if cookies:
            prepared.prepare_cookies(cookies)
        prepared.prepare_body(params.get("data"), None, params.get("json"))
        if auth:
            prepared.prepare_auth(tuple(auth))
    except (requests.RequestException, ValueError, TypeError, KeyError) as error:
        refuse_to_compose(error)
    return prepared


def _send(
    prepared: requests.PreparedRequest, policy: Policy, deadline: Deadline, answer: Answer
) -> None:
    """The request and its answer, body read. Whatever is raised, `answer` says how far this got. A
    test may have put an adapter in ours' place.
    """
    target = target_of(prepared.url, policy)
    session, ours = this_thread()
    ours.enter(target, policy, deadline)
    try:
        response = _sent(session, prepared, policy, deadline)
        body = read_body(response, policy.max_response_bytes, deadline)
        response._content, answer.error = body.content, body.error
        response._content_consumed = True  # type: ignore[attr-defined]
        answer.truncated, answer.broken = body.truncated, body.broken
        answer.response = response
        if body.is_whole:
            ours.keep(response)
    finally:
        ours.leave()


def _sent(
    session: requests.Session,
    prepared: requests.PreparedRequest,
    policy: Policy,
    deadline: Deadline,
) -> requests.Response:
    """The response with its body still to be read. `elapsed` is without the time in the gate."""
    timeouts = deadline.timeouts
    began = now()
    response = session.get_adapter(prepared.url or "").send(
        prepared,
        stream=True,
        timeout=(timeouts.connect, timeouts.read),
        verify=policy.verify,
        proxies={},
    )
    response.elapsed = timedelta(seconds=now() - began - deadline.in_gate)
    # what a hook reads as text is looked up by no name of the server's
    if response.encoding is not None:
        response.encoding = charset(response.encoding)
    return response
