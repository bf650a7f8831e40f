"""A permit for each request that an HTTP client makes, whichever client that is.

In: a request's method and URL, then its answer as a `requests.Response`. The answer is judged as a
worker judges it: `classify`, `settle`, a refusal's `Retry-After`, and the circuit breaker. Refuses
nothing that the client would do.
"""

from __future__ import annotations

from typing import Any

import requests
from requests.structures import CaseInsensitiveDict

from callqueue import conf
from callqueue.exceptions import NotAllowed
from callqueue.execution import judging
from callqueue.execution.recorder import scrubbed
from callqueue.execution.wire import Answer
from callqueue.permits.asking import Options, Wanted, rule_of
from callqueue.permits.granted import Permit
from callqueue.transitions import Result

PASS, REFUSE = conf.OTHER_HOSTS


def wanted(options: Options, method: str, url: str) -> Wanted | None:
    """The permit that a request needs; None where its host has no rule, and passes."""
    if options.rule is None and rule_of(url) is None:
        if conf.current().other_hosts == REFUSE:
            raise NotAllowed("no rule names this host, and CALLQUEUE['OTHER_HOSTS'] refuses it")
        return None
    return options.wanted(url, method)


def judged(permit: Permit, response: requests.Response, *, is_cut: bool = False) -> Result:
    """What this answer makes of the permit. `is_cut`: its body is the beginning of what came."""
    answer = Answer(response, None, sent=True, truncated=is_cut)
    return scrubbed(judging.of_answer(permit.job, answer), ())


def as_response(status: int, headers: Any, body: bytes, url: str) -> requests.Response:
    """An answer as `classify` and `settle` know it; `body`: as much as is known of it."""
    response = requests.Response()
    response.status_code, response.url = status, url
    response.headers = CaseInsensitiveDict(headers)
    response._content = body
    return response


def wants_body(permit: Permit) -> bool:
    """Whether the rule judges, or settles, by the body."""
    rule = permit.job.sound_rule
    return rule.classify is not None or rule.settle is not None


def lasts(permit: Permit) -> bool:
    """Whether a permit is charged until the whole body has come: a limit counts what is in
    flight.
    """
    return any(limit.counts_in_flight for limit in permit.job.sound_rule.limits)
