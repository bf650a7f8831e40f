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
from callqueue.permits.granted import Permit
from callqueue.permits.permit import begin
from callqueue.permits.transport import Options


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
        asked = self._options.wanted(request.method or "", request.url or "")
        if asked is None:
            return super().send(request, stream=stream, **how)
        turn = _Turn(lambda: begin(asked))
        before, _turns.current = getattr(_turns, "current", None), turn
        try:
            response = super().send(request, stream=stream, **how)
            body = None if stream else response.content
        except BaseException as error:
            turn.failed(error)
            raise
        finally:
            _turns.current = before
        turn.answered(
            response.status_code, dict(response.headers), body, request.url or "", response.elapsed
        )
        return response


class _Turn:
    """The permits of one request: one for each time that it is sent."""

    def __init__(self, begin_one: Any) -> None:
        self._begin = begin_one
        self._permit: Permit | None = begin_one()

    def answered(self, status: int, headers: Any, body: bytes | None, url: str, _: Any) -> None:
        """The last answer is there."""
        if self._permit is not None:
            transport.answered(self._permit, transport.as_response(status, headers, body, url))
            self._permit = None

    def failed(self, error: BaseException) -> None:
        """It will not be sent again."""
        if self._permit is not None:
            transport.failed(self._permit, error)
            self._permit = None

    def again(self, response: Any) -> None:
        """It failed, or had this answer, and is sent once more."""
        if response is None:
            self.failed(ConnectionError())
        else:
            self.answered(response.status, dict(response.headers), b"", "", None)
        self._permit = self._begin()


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
