"""requests' session, queued: `Session(rule=...).post(url, json=...)` queues the call and returns
its row.

`QueueAdapter` does the same for code that insists on a requests.Session and on a response: it gets
202 and the call's id. Arguments of requests enter; what `CallQueue.objects.send` takes leaves.
Opens no connection.
"""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import BaseAdapter
from requests.cookies import RequestsCookieJar
from requests.structures import CaseInsensitiveDict

from callqueue import tables
from callqueue.exceptions import InvalidCall
from callqueue.integrations.requests_arguments import (
    body_of,
    cookies_for,
    credentials,
    merged_headers,
    own_headers,
    refuse,
)
from callqueue.security.secrets import Secret
from callqueue.sending.intake import ARGUMENTS
from callqueue.sending.validation import ELSEWHERE

if TYPE_CHECKING:
    from callqueue.models import CallQueue

merge_setting: Any = requests.sessions.merge_setting  # requests has no types for it

OF_THE_SESSION = ("headers", "params", "auth", "cookies")


class Session:
    """Looks like requests.Session; each request is queued, and what it returns is the CallQueue
    row.

    `rule` and the rest are arguments of `send`, for every call of the session; a single request may
    state its own, beside requests' arguments. `headers`, `params`, `auth` and `cookies` of the
    session are merged into each call as requests does. None where the ROUTER discards the call.
    Raises what `send` raises.
    """

    def __init__(
        self, rule: str | None = None, *, using: str | None = None, **arguments: Any
    ) -> None:
        unknown = sorted(arguments.keys() - set(ARGUMENTS))
        if unknown:
            raise TypeError(f"Session() got an unexpected argument {unknown[0]!r}")
        self.headers: CaseInsensitiveDict[Any] = CaseInsensitiveDict()
        self.params: Any = {}
        self.auth: Any = None
        self.cookies: Any = RequestsCookieJar()
        self._using = using
        self._arguments = {"rule": rule, **arguments}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in OF_THE_SESSION and not name.startswith("_"):
            raise InvalidCall(name, ELSEWHERE.get(name, "cannot be set on a callqueue.Session"))
        super().__setattr__(name, value)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """There is nothing to close: calls are made by workers."""

    def request(
        self,
        method: str,
        url: str | bytes | Secret,
        params: Any = None,
        data: Any = None,
        headers: Any = None,
        cookies: Any = None,
        files: Any = None,
        auth: Any = None,
        timeout: Any = None,
        allow_redirects: Any = None,
        proxies: Any = None,
        hooks: Any = None,
        stream: Any = None,
        verify: Any = None,
        cert: Any = None,
        json: Any = None,
        **arguments: Any,
    ) -> tables.CallQueue | None:
        """Queue a call. Beside requests' arguments takes those of `send`, which win over the
        session's.

        InvalidCall names an argument that cannot be queued (`timeout`, `files`, ...) and where to
        set it.
        """
        refuse(
            timeout=timeout, allow_redirects=allow_redirects, proxies=proxies, hooks=hooks,
            stream=stream, verify=verify, cert=cert, files=files,
        )  # fmt: skip
        unknown = sorted(arguments.keys() - set(ARGUMENTS))
        if unknown:
            raise TypeError(f"request() got an unexpected keyword argument {unknown[0]!r}")
        address: Any = (
            url if isinstance(url, Secret) else url.decode() if isinstance(url, bytes) else str(url)
        )
        merged: dict[str, Any] = {
            "params": merge_setting(params, self.params),
            "data": body_of(data),
            "json": json,
            "headers": merged_headers(self.headers, headers),
            "cookies": cookies_for(address, self.cookies, cookies),
            "auth": credentials(merge_setting(auth, self.auth)),
        }
        given = {
            name: value
            for name, value in merged.items()
            if value is not None and (name == "json" or value)
        }
        call_data = {"method": method, "params": {"url": address, **given}}
        call: tables.CallQueue | None = tables.CallQueue.objects.db_manager(self._using).send(
            call_data, **{**self._arguments, **arguments}
        )
        return call

    def get(self, url: str | bytes | Secret, params: Any = None, **kwargs: Any) -> CallQueue | None:
        """Queue a GET."""
        return self.request("get", url, params=params, **kwargs)

    def options(self, url: str | bytes | Secret, **kwargs: Any) -> CallQueue | None:
        """Queue an OPTIONS."""
        return self.request("options", url, **kwargs)

    def head(self, url: str | bytes | Secret, **kwargs: Any) -> CallQueue | None:
        """Queue a HEAD."""
        return self.request("head", url, **kwargs)

    def post(
        self, url: str | bytes | Secret, data: Any = None, json: Any = None, **kwargs: Any
    ) -> CallQueue | None:
        """Queue a POST."""
        return self.request("post", url, data=data, json=json, **kwargs)

    def put(self, url: str | bytes | Secret, data: Any = None, **kwargs: Any) -> CallQueue | None:
        """Queue a PUT."""
        return self.request("put", url, data=data, **kwargs)

    def patch(self, url: str | bytes | Secret, data: Any = None, **kwargs: Any) -> CallQueue | None:
        """Queue a PATCH."""
        return self.request("patch", url, data=data, **kwargs)

    def delete(self, url: str | bytes | Secret, **kwargs: Any) -> CallQueue | None:
        """Queue a DELETE."""
        return self.request("delete", url, **kwargs)


class QueueAdapter(BaseAdapter):
    """For requests.Session: `session.mount("https://api.example.com",
    QueueAdapter(rule="example"))`.

    A request to such a URL is queued; the response is 202 at once, with the header X-Callqueue-Id
    and the body {"call_id": ...}. `timeout` and proxies of the request do not apply; the rule's do.
    Arguments as Session's.
    """

    def __init__(
        self, rule: str | None = None, *, using: str | None = None, **arguments: Any
    ) -> None:
        super().__init__()
        self._session = Session(rule, using=using, **arguments)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """Queue the prepared request, and answer 202."""
        if verify is False:
            raise InvalidCall("verify", ELSEWHERE["verify"])
        if cert:
            raise InvalidCall("cert", ELSEWHERE["cert"])
        headers = own_headers(request.headers)
        call = self._session.request(
            request.method or "get", request.url or "", data=body_of(request.body), headers=headers
        )
        return _accepted(request, None if call is None else call.pk)

    def close(self) -> None:
        """There is nothing to close."""


def queued_session(rule: str | None = None, **arguments: Any) -> requests.Session:
    """A requests.Session whose every request is queued, for code that takes a session: see
    QueueAdapter.
    """
    session = requests.Session()
    session.trust_env = False
    for scheme in ("https://", "http://"):
        session.mount(scheme, QueueAdapter(rule, **arguments))
    return session


def _accepted(request: requests.PreparedRequest, call_id: int | None) -> requests.Response:
    response = requests.Response()
    response.status_code, response.reason = 202, "Accepted"
    response.request, response.url = request, request.url or ""
    response.headers["Content-Type"] = "application/json"
    if call_id is not None:
        response.headers["X-Callqueue-Id"] = str(call_id)
    response._content = jsonlib.dumps({"call_id": call_id}).encode()
    response.encoding = "utf-8"
    return response
