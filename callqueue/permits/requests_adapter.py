"""`PermitAdapter`: a permit for each request of a `requests.Session`.

`session.mount("https://", callqueue.PermitAdapter())`. Redirects that the session follows and
retries that the adapter makes (`max_retries`) take a permit each.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from callqueue.permits import transport
from callqueue.permits.asking import Options, Wanted
from callqueue.permits.granted import Permit
from callqueue.permits.permit import begin


class PermitAdapter(HTTPAdapter):
    """A transport of `requests` that makes each request under a permit.

    `rule`: under which; without it the rule whose hosts name the request's, and hosts without a
    rule go as `CALLQUEUE["OTHER_HOSTS"]` says. `key`, `cost`, `priority`, `wait`, `lease`, `label`:
    see `callqueue.permit`. The rest is HTTPAdapter's. Raises NotNow where no permit is to be had
    within `wait`.
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
        **of_adapter: Any,
    ) -> None:
        self._options = Options(rule, key, cost, priority, wait, lease, label)
        super().__init__(**of_adapter)
        self.max_retries = _Charged.of(self.max_retries)

    def send(  # type: ignore[override]
        self, request: requests.PreparedRequest, stream: bool = False, **how: Any
    ) -> requests.Response:
        """Send the request under a permit."""
        url = request.url or ""
        asked = transport.wanted(self._options, request.method or "", url)
        if asked is None:
            return super().send(request, stream=stream, **how)
        turn = _Turn(asked)
        before, _turns.current = getattr(_turns, "current", None), turn
        try:
            response = super().send(request, stream=stream, **how)
            if not stream:
                _ = response.content
        except BaseException as error:
            turn.failed(error)
            raise
        finally:
            _turns.current = before
        if stream:
            told = transport.as_response(response.status_code, response.headers, None, url)
            turn.answered(told, response.raw)
        else:
            turn.answered(response)
        return response


class _Turn:
    """The permits of one request: one for each time that it is sent."""

    def __init__(self, asked: Wanted) -> None:
        self._asked = asked
        self._permit: Permit | None = begin(asked)

    def answered(self, response: requests.Response, raw: Any = None) -> None:
        """An answer is there; `raw`: the connection that its body still comes by."""
        permit, self._permit = self._permit, None
        if permit is None:
            return
        result = transport.judged(permit, response)
        if raw is None or not transport.lasts(permit):
            permit.end_with(result)
            return
        permit.answered(result)
        _after(raw, lambda: permit.end_with(result))

    def failed(self, error: BaseException) -> None:
        """It will not be sent again."""
        permit, self._permit = self._permit, None
        if permit is not None:
            permit.end_with(permit.ended(error))

    def again(self, response: Any) -> None:
        """It failed, or had this answer, and is sent once more."""
        if response is None:
            self.failed(ConnectionError())
        else:
            headers = dict(response.headers)
            self.answered(transport.as_response(response.status, headers, None, ""))
        self._permit = begin(self._asked)


def _after(raw: Any, end: Any) -> None:
    """Call `end` once, when the connection is let go: all of the body has come, or it is closed."""
    release, owed = raw.release_conn, [end]

    def released() -> None:
        release()
        while owed:
            owed.pop()()

    raw.release_conn = released


class _Charged(Retry):
    """urllib3's retries, each of which takes a permit before it goes."""

    @classmethod
    def of(cls, retry: Retry) -> Retry:
        """The same retries, charged."""
        made = retry.new()
        kind = type(retry)
        if not issubclass(kind, _Charged):
            mixed = cls if kind is Retry else type(f"Charged{kind.__name__}", (cls, kind), {})
            made.__class__ = mixed
        return made

    def sleep(self, response: Any = None) -> None:
        """Wait as urllib3 does, then for a permit."""
        super().sleep(response)
        turn = getattr(_turns, "current", None)
        if turn is not None:
            turn.again(response)


_turns = threading.local()
