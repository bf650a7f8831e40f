"""What a test answers in place of an API, as the HTTP client's own Answer."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import requests

    from callqueue.execution.http import client
    from callqueue.testing.transport import Request

HTTP_REASONS = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True)
class Given:
    """A status, headers and a body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self, made: Request) -> requests.Response:
        """The answer to a request, as requests gives it."""
        import requests
        from requests.utils import get_encoding_from_headers

        response = requests.Response()
        response.status_code = self.status
        response.headers.update(self.headers)
        response._content = self.body
        response.url = made.url
        response.reason = HTTP_REASONS.get(self.status, "")
        response.encoding = get_encoding_from_headers(response.headers)
        return response


def answer(
    status: int = 200,
    *,
    json: Any = None,
    body: str | bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Given:
    """An answer for `fake_transport`: a status, and JSON or a body."""
    if json is None:
        return Given(status, dict(headers or {}), _bytes(body))
    headers = {"Content-Type": "application/json", **(headers or {})}
    return Given(status, headers, jsonlib.dumps(json).encode())


def in_turn(*answers: Any) -> Callable[[Request], Any]:
    """One answer after the other, the last one for ever."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def as_answer(made: Request, given: Any, sent_at: float) -> client.Answer:
    """The client's Answer for what the test gave. Raises what is no exception of requests'."""
    from callqueue.execution.http import client

    if isinstance(given, client.Answer):
        return given
    if is_exception(given):
        return _as_failure(given, sent_at)
    return client.Answer(response=_as_given(given).response(made), sent_at=sent_at, sent=True)


def is_exception(given: Any) -> bool:
    """Whether the answer is an exception, or a class of them."""
    kind = given if isinstance(given, type) else type(given)
    return issubclass(kind, BaseException)


def is_unsent(given: Any) -> bool:
    """Whether the answer is an exception that says that nothing was sent."""
    import requests

    kind = given if isinstance(given, type) else type(given)
    lost = (requests.exceptions.ReadTimeout, requests.exceptions.ChunkedEncodingError)
    return issubclass(kind, requests.exceptions.RequestException) and not issubclass(kind, lost)


def _as_failure(given: Any, sent_at: float) -> client.Answer:
    """A failure of the network, as the client tells it; any other exception is raised."""
    import requests

    from callqueue.execution.http import client

    error = given() if isinstance(given, type) else given
    if not isinstance(error, requests.exceptions.RequestException):
        raise error
    why = f"{type(error).__name__}: {error}".rstrip(": ")
    if is_unsent(error):
        return client.Answer(None, None, error=why)
    return client.Answer(None, sent_at, error=why, sent=True)


def _as_given(given: Any) -> Given:
    if isinstance(given, Given):
        return given
    if isinstance(given, bool) or given is None:
        raise TypeError(
            f"{given!r} is no answer for fake_transport; see callqueue.testing.FakeTransport"
        )
    if isinstance(given, int):
        return Given(given, {}, b"")
    if isinstance(given, str | bytes):
        return Given(200, {}, _bytes(given))
    if not isinstance(given, tuple):
        return answer(json=given)
    status, headers, *rest = given
    body = rest[0] if rest else b""
    if isinstance(body, str | bytes):
        return answer(status, headers=headers, body=body)
    return answer(status, headers=headers, json=body)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
