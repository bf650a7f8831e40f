"""What a provider says of its limits in an answer, and the default verdict of a rule.

In: a status, headers, the beginning of a body, the time. Out: an outcome, or a hold. Pure: no
Django, no clock. What a provider says may only tighten what the limits say, lasts at most
`max_hold`, and never raises, whatever it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import datetime
from http import HTTPStatus
from urllib.parse import urlsplit

from callqueue.execution.header_values import count_of, plain_headers
from callqueue.execution.limit_headers import (
    Advice,
    rate_limit_headers,
    reset_of_refusal,
    retry_after,
)
from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded

_OVERLOADED = 529
_THROTTLED_BODY = ("secondary rate limit", "rate limit exceeded", "abuse detection")
_BODY_START = 4096  # bytes of a body that are read
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


def verdict(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    retry_statuses: Collection[int],
    now: datetime,
    max_hold: float,
) -> Outcome:
    """The default verdict on an answer: success, a hold, a retry or the end.

    A throttled answer is a 429 (RFC 6585 section 4), a 503 with Retry-After (RFC 9110 section
    15.6.4), a 529 (Anthropic's overloaded_error, Qualys SSL Labs), or GitHub's 403 ("Rate limits
    for the REST API": a Retry-After, x-ratelimit-remaining: 0, or a body that names a rate limit).
    Without a usable time the hold lasts as long as the rule's backoff (None).
    """
    if 200 <= status < 300:
        return Succeeded()
    plain, why = plain_headers(headers), _phrase(status)
    if _is_throttled(status, plain, body):
        return _hold(why, headers, now=now, max_hold=max_hold)
    if status in retry_statuses:
        return RetryLater(why)
    if 300 <= status < 400 and "location" in plain:
        return GiveUp(f"{why}; redirect {_to_host(plain['location'])}not followed")
    return GiveUp(why)


def tightening(
    status: int, headers: Mapping[str, str], *, now: datetime, max_hold: float
) -> HoldUntil | None:
    """The hold that an answer asks for, a success too: nothing remains until its reset."""
    # most answers say nothing of limits, and cost no parsing
    if not any("rate" in name.lower() for name in headers):
        return None
    advice = rate_limit_headers(headers, now=now, max_hold=max_hold)
    if not advice.until_s:
        return None
    return HoldUntil(advice.until_s, f"nothing remains for {_text(advice)}")


def _is_throttled(status: int, plain: Mapping[str, str], body: bytes) -> bool:
    if status in (HTTPStatus.TOO_MANY_REQUESTS, _OVERLOADED):
        return True
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "retry-after" in plain
    if status != HTTPStatus.FORBIDDEN:
        return False
    if "retry-after" in plain or count_of(plain.get("x-ratelimit-remaining", "")) == 0:
        return True
    text = body[:_BODY_START].decode("utf-8", "ignore").lower()
    return any(words in text for words in _THROTTLED_BODY)


def _hold(why: str, headers: Mapping[str, str], *, now: datetime, max_hold: float) -> HoldUntil:
    """Until Retry-After, which takes precedence, or else until the reset of what is used up."""
    asked = retry_after(headers, now=now, max_hold=max_hold)
    if asked.until_s is not None:
        return HoldUntil(asked.until_s, f"{why}; Retry-After {_text(asked)}")
    reset = reset_of_refusal(headers, now=now, max_hold=max_hold)
    if reset.until_s:
        return HoldUntil(
            reset.until_s, "; ".join(filter(None, [why, asked.note, f"reset in {_text(reset)}"]))
        )
    late = "its reset is already past" if reset.until_s == 0 else reset.note
    return HoldUntil(None, "; ".join(filter(None, [why, asked.note, late])))


def _to_host(location: str) -> str:
    """The words "to HOST ", or none for a relative or unreadable Location."""
    try:
        host = urlsplit(location).hostname or ""
    except ValueError:
        return ""
    return f"to {host} " if _HOST.fullmatch(host) else ""


def _text(advice: Advice) -> str:
    note = f" ({advice.note})" if advice.note else ""
    return f"{round(advice.until_s or 0.0, 3):.12g} s{note}"


def _phrase(status: int) -> str:
    if status == _OVERLOADED:
        return f"{status} Site is overloaded"
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
