"""A permit for each request of an HTTP client, whichever that is; the adapter of requests. Answers
are judged as by a worker. Nothing is refused that the client would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict

from callqueue.exceptions import InvalidCall
from callqueue.execution import judging
from callqueue.execution.request import scrub_result
from callqueue.execution.wire import Answer
from callqueue.permits.asking import Options, Wanted, rule_of
from callqueue.permits.granted import Permit
from callqueue.permits.permit import begin
from callqueue.transitions import Result


def wanted_for_url(options: Options, url: str) -> Wanted | None:
    """The permit that a request needs; None where its host has no rule, and passes."""
    return options.as_wanted(url) if options.rule is not None or rule_of(url) else None


def result_of_response(
    permit: Permit, response: requests.Response, *, is_cut: bool = False
) -> Result:
    """How this answer ends the permit. `is_cut`: its body is the beginning of what came."""
    answer = Answer(response, None, sent=True, truncated=is_cut)
    return scrub_result(judging.result_of_answer(permit.job, answer), ())


def as_response(status: int, headers: Any, body: bytes | None, url: str) -> Any:
    """An answer as `classify` and `settle` know it; to read a `body` that is None raises."""
    response: Any = requests.Response()
    response.status_code, response.url = status, url
    response.headers = CaseInsensitiveDict(headers)
    response._content, response._content_consumed = False if body is None else body, True
    return response


def wants_body(permit: Permit) -> bool:
    rule = permit.job.sound_rule
    return rule.classify is not None or rule.settle is not None


def is_charged_until_read(permit: Permit) -> bool:
    """Whether it is charged until the whole body has come: a limit counts what is in flight."""
    return any(limit.counts_in_flight for limit in permit.job.sound_rule.limits)


class PermitAdapter(HTTPAdapter):
    """A transport of `requests` that makes each request under a permit.

    `rule`: under which; without it the rule whose hosts name the request's, and hosts without a
    rule pass. `key` to `label`: see `callqueue.permit`. The rest is HTTPAdapter's, but for
    `max_retries`, which is refused. Raises NotNow where no permit is to be had within `wait`.
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
        url = request.url or ""
        if (asked := wanted_for_url(self._options, url)) is None:
            return super().send(request, stream=stream, **how)
        permit = begin(asked)
        try:
            told = response = super().send(request, stream=stream, **how)
            if stream:
                told = as_response(response.status_code, response.headers, None, url)
            else:
                _ = response.content
        except BaseException as error:
            permit.end_with(permit.result_of(error))
            raise
        result = result_of_response(permit, told)
        if stream and is_charged_until_read(permit):
            permit.hold_and_tell_sent(result)
            _call_on_release(response.raw, lambda: permit.end_with(result))
        else:
            permit.end_with(result)
        return response


def _call_on_release(raw: Any, end: Callable[[], object]) -> None:
    """Call `end` once, when the connection is let go: all of the body has come, or it is closed."""
    release, owed = raw.release_conn, [end]

    def release_and_end() -> None:
        release()
        while owed:
            owed.pop()()

    raw.release_conn = release_and_end
