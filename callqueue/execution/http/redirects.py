"""The next hop of a redirect, without what only the origin of the last one may know.

A request and its answer enter; the next request leaves, or Refused. What may be called is not
judged here: every hop is checked before it is made.
"""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

import requests

from callqueue.execution.http.errors import Refused
from callqueue.execution.http.policy import Policy
from callqueue.security.credentials import is_for_its_origin
from callqueue.security.scrubbing import holds

_OF_THE_BODY = (
    "Content-Length",
    "Content-Type",
    "Content-Encoding",
    "Content-Language",
    "Transfer-Encoding",
)
_NOT_FOLLOWED = "a redirect was not followed: it leads to another origin, and"


def location_of(response: requests.Response) -> str | None:
    """Where the answer redirects to; None where it does not. HTTP reads the header's bytes as
    Latin-1, and servers write them as UTF-8.
    """
    if not response.is_redirect:
        return None
    location = response.headers["location"]
    try:
        return location.encode("latin-1").decode("utf-8") or None
    except ValueError:
        return location or None


def redirected(
    prepared: requests.PreparedRequest, response: requests.Response, location: str, policy: Policy
) -> requests.PreparedRequest:
    """The next hop's request. Refused if none can be made, or a secret would leave its origin."""
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
    if not is_same_origin(prepared.url or "", onward.url or ""):
        _leave_secrets(onward, policy)
    return onward


def is_same_origin(one: str, other: str) -> bool:
    """Whether both URLs have the same scheme, host and port. From http to https on their default
    ports counts as the same, as in requests.
    """
    before, after = _origin(one), _origin(other)
    return before == after or (
        before == ("http", after[1], 80) and after == ("https", before[1], 443)
    )


def _method_after(status: int, method: str) -> str:
    """RFC 9110 section 15.4, as browsers read it: only a 307 or 308 repeats a POST."""
    if status in (302, 303) and method != "HEAD":
        return "GET"
    return "GET" if status == 301 and method == "POST" else method


def _leave_secrets(onward: requests.PreparedRequest, policy: Policy) -> None:
    """Take what is secret out of a request to another origin; Refused where it cannot be taken out,
    or may go nowhere else.
    """
    if policy.is_bound:
        raise Refused(f"{_NOT_FOLLOWED} a secret of the call is bound to its places")
    for name, value in list(onward.headers.items()):
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if is_for_its_origin(name, text) or holds(text, policy.secrets):
            del onward.headers[name]
    body = onward.body.decode("utf-8", "replace") if isinstance(onward.body, bytes) else onward.body
    if isinstance(body, str) and holds(body, policy.secrets):
        raise Refused(f"{_NOT_FOLLOWED} the body holds a secret")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        return "", None, None
    if port is None:
        port = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port
