"""Arguments of requests as a call takes them: bodies, credentials, cookies and headers.

In: what requests takes. Out: JSON, or InvalidCall, which names what cannot be queued.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.cookiejar import CookieJar
from typing import Any

import requests
from requests.auth import HTTPBasicAuth
from requests.cookies import RequestsCookieJar
from requests.structures import CaseInsensitiveDict
from requests.utils import default_headers

from callqueue.exceptions import InvalidCall
from callqueue.security.secrets import Secret
from callqueue.sending.validation import ELSEWHERE, FRAMING

merge_cookies: Any = requests.cookies.merge_cookies  # requests has no types for these
cookiejar_from_dict: Any = requests.cookies.cookiejar_from_dict
cookie_header: Any = requests.cookies.get_cookie_header


def refuse(**given: Any) -> None:
    """InvalidCall for the first of these arguments that is given, and where to set it instead."""
    for name, value in given.items():
        if value is not None:
            raise InvalidCall(name, ELSEWHERE[name])


def body_of(data: Any) -> Any:
    """Text, a mapping or pairs as they are; bytes as the text they are; None for nothing."""
    if isinstance(data, bytes | bytearray):
        try:
            data = bytes(data).decode()
        except UnicodeDecodeError:
            raise InvalidCall(
                "data",
                "is bytes that are no UTF-8 text; bodies are JSON or text, so send it as base64",
            ) from None
    if data is not None and not isinstance(data, str | Mapping | list | tuple | Secret):
        raise InvalidCall(
            "data", f"is a {type(data).__name__}; bodies are JSON or text, read it first"
        )
    return data or None


def credentials(auth: Any) -> Any:
    """User and password as a pair; None for nothing."""
    if isinstance(auth, HTTPBasicAuth):
        return [auth.username, auth.password]
    if auth is not None and not isinstance(auth, tuple | list):
        raise InvalidCall(
            "auth", f"is a {type(auth).__name__}; give (user, password), or an Authorization header"
        )
    return list(auth) if auth else None


def cookies_for(url: Any, of_session: Any, of_request: Any) -> dict[str, Any] | None:
    """The cookies that requests would send to this URL. Those whose value is a secret are kept as
    they are.
    """
    references: dict[str, Any] = {}
    jar = RequestsCookieJar()
    for cookies in (of_session, of_request):
        if isinstance(cookies, CookieJar):
            merge_cookies(jar, cookies)
        elif cookies:
            references |= {n: v for n, v in cookies.items() if isinstance(v, Secret)}
            merge_cookies(
                jar,
                cookiejar_from_dict(
                    {n: v for n, v in cookies.items() if not isinstance(v, Secret)}
                ),
            )
    if isinstance(url, Secret):  # it cannot be told which of a host's it is
        return {
            cookie.name: cookie.value for cookie in jar if not cookie.domain
        } | references or None
    if not len(jar):
        return references or None
    header = cookie_header(jar, requests.Request("GET", url)) or ""
    sent = dict(part.split("=", 1) for part in header.split("; ") if "=" in part)
    return {**sent, **references} or None


def merged_headers(of_session: Any, of_request: Any) -> dict[str, Any]:
    """The session's headers with the request's laid over. None takes one of the session's away, and
    one that requests adds by itself.
    """
    merged: CaseInsensitiveDict[Any] = CaseInsensitiveDict(of_session or {})
    merged.update(of_request or {})
    usual = default_headers()
    return {n: v for n, v in merged.items() if v is not None or n in usual}


def own_headers(headers: Mapping[str, Any]) -> dict[str, str | None]:
    """The request's headers without those that are written from URL and body, and those that
    requests adds by itself; None for one of these that it does not have.
    """
    usual = {name.lower(): value for name, value in default_headers().items()}
    texts = {
        name: value.decode("latin-1") if isinstance(value, bytes) else value
        for name, value in headers.items()
    }
    own: dict[str, str | None] = {
        n: v for n, v in texts.items() if n.lower() not in FRAMING and usual.get(n.lower()) != v
    }
    taken_away = usual.keys() - {name.lower() for name in texts} - FRAMING
    return {**own, **dict.fromkeys(sorted(taken_away))}
