"""`PermitAdapter`: a permit for each request of a `requests.Session`.

`session.mount("https://", callqueue.PermitAdapter())`. Redirects that the session follows take a
permit each. Of an answer that is streamed, the status and the headers are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from callqueue.exceptions import InvalidCall
from callqueue.permits import transport
from callqueue.permits.asking import Options
from callqueue.permits.permit import begin


class PermitAdapter(HTTPAdapter):
    """A transport of `requests` that makes each request under a permit.

    `rule`: under which; without it the rule whose hosts name the request's, and hosts without a
    rule go as `CALLQUEUE["OTHER_HOSTS"]` says. `key`, `cost`, `priority`, `wait`, `lease`, `label`:
    see `callqueue.permit`. The rest is HTTPAdapter's, but for `max_retries`, which is refused.
    Raises NotNow where no permit is to be had within `wait`.
    """

    __attrs__ = [*HTTPAdapter.__attrs__, "_options"]

    def __init__(
        self,
        rule: str | None = None,
        *,
        key: str | Mapping[str, str] = "",
        cost: int | Mapping[str, int] = 1,
        priority: int | None = None,
        wait: float | None = None,
        lease: float | None = None,
        label: str = "",
        max_retries: int = 0,
        **of_adapter: Any,
    ) -> None:
        if max_retries != 0:
            raise InvalidCall(
                "max_retries",
                "would send a request again without a permit; retry around the session",
            )
        self._options = Options(rule, key, cost, priority, wait, lease, label)
        super().__init__(**of_adapter)

    def send(  # type: ignore[override]
        self, request: requests.PreparedRequest, stream: bool = False, **how: Any
    ) -> requests.Response:
        """Send the request under a permit."""
        url = request.url or ""
        if (asked := transport.wanted(self._options, request.method or "", url)) is None:
            return super().send(request, stream=stream, **how)
        permit = begin(asked)
        try:
            told = response = super().send(request, stream=stream, **how)
            if stream:
                told = transport.as_response(response.status_code, response.headers, b"", url)
            else:
                _ = response.content
        except BaseException as error:
            permit.end_with(permit.ended(error))
            raise
        result = transport.judged(permit, told)
        if stream and transport.lasts(permit):
            permit.answered(result)
            _after(response.raw, lambda: permit.end_with(result))
        else:
            permit.end_with(result)
        return response


def _after(raw: Any, end: Callable[[], object]) -> None:
    """Call `end` once, when the connection is let go: all of the body has come, or it is closed."""
    release, owed = raw.release_conn, [end]

    def released() -> None:
        release()
        while owed:
            owed.pop()()

    raw.release_conn = released
