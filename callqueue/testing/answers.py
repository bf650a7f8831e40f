"""What a test answers in place of an API, as the HTTP client's own Answer."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from copy import copy
from http.client import responses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import requests

    from callqueue.execution import wire


class UnexpectedRequest(AssertionError):
    """A call was made that the test has no answer for."""


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


def as_answer(given: Any, url: str, sent_at: float) -> wire.Answer:
    """The client's Answer for what the test gave. Raises what is no exception of requests'."""
    import requests

    from callqueue.execution import wire

    given = given() if isinstance(given, type) else given
    if isinstance(given, requests.RequestException):
        why = f"{type(given).__name__}: {given}".rstrip(": ")
        sent = not is_unsent(given)
        return wire.Answer(None, sent_at if sent else None, error=why, sent=sent)
    if isinstance(given, BaseException):
        raise given
    response = copy(_as_response(given))
    response.url = url
    return wire.Answer(response, sent_at, sent=True)


def is_unsent(given: Any) -> bool:
    """Whether the answer is an exception that says that nothing was sent."""
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
