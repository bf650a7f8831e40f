"""A permit for each request that an HTTP client makes, whichever client that is.

In: a request's method and URL, then its answer as a `requests.Response`. The answer is judged as a
worker judges it: `classify`, `settle`, `Retry-After` and what its headers say of limits, and the
circuit breaker. Refuses nothing that the client would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import requests
from requests.structures import CaseInsensitiveDict

from callqueue import clocks, conf, transitions
from callqueue.exceptions import NotAllowed
from callqueue.execution import judging
from callqueue.execution.http.client import Answer
from callqueue.permits.asking import Wanted, rule_of, wanted
from callqueue.permits.granted import Permit
from callqueue.transitions import Result

PASS, REFUSE = conf.OTHER_HOSTS


@dataclass(frozen=True)
class Options:
    """What all requests of a transport ask for; see `callqueue.permit`."""

    rule: str | None = None
    key: str | Mapping[str, str] = ""
    cost: int | Mapping[str, int] = 1
    priority: int | None = None
    wait: float | None = None
    lease: float | None = None
    label: str = ""

    def wanted(self, method: str, url: str) -> Wanted | None:
        """The permit that a request needs; None where its host has no rule, and passes."""
        rule = self.rule if self.rule is not None else rule_of(url)
        if rule is None:
            if conf.current().other_hosts == REFUSE:
                raise NotAllowed("no rule names this host, and CALLQUEUE['OTHER_HOSTS'] refuses it")
            return None
        return wanted(
            rule,
            key=self.key,
            cost=self.cost,
            priority=self.priority,
            wait=self.wait,
            lease=self.lease,
            label=self.label,
            method=method.lower(),
        )


def answered(permit: Permit, response: requests.Response) -> None:
    """The permit ends with this answer."""
    answer = Answer(response, None, sent=True)
    permit.end_with(judging.of_answer(permit.job, answer))


def failed(permit: Permit, error: BaseException) -> None:
    """The permit ends without an answer; the request may have left."""
    permit.end_with(ended_by(permit, error))


def ended_by(permit: Permit, error: BaseException) -> Result:
    """The result of a request that raised this."""
    job, at = permit.job, permit.job.now()
    result = transitions.after_failure(job, job.sound_rule, type(error).__name__, at)
    return result.at(at, clocks.monotonic())


def as_response(status: int, headers: Any, body: bytes | None, url: str) -> requests.Response:
    """An answer as `classify` and `settle` know it; `body` None: it was not read."""
    response = requests.Response()
    response.status_code, response.url = status, url
    response.headers = CaseInsensitiveDict(headers)
    response._content = body if body is not None else b""
    return response


def is_worth_reading(permit: Permit, status: int, content_type: str) -> bool:
    """Whether an answer's body is read before the client asks for it: where the verdict may hang on
    it, or the rule settles by it; never one that is streamed by events.
    """
    rule = permit.job.sound_rule
    wants_body = rule.classify is not None or rule.settle is not None
    return (status >= 400 or wants_body) and "event-stream" not in content_type.lower()
