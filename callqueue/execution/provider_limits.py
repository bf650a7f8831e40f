"""What a provider says of its limits where it refuses a call, and the default verdict of a rule.

In: a status, headers, the beginning of a body, the time. Out: an outcome. Pure: no Django, no
clock. What a provider says may only tighten what the limits say, lasts at most `max_hold`, and
never raises, whatever it is. Only a refusal is a reason to hold: a success with which nothing
remains says what the limits know, later than they do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus

from callqueue.execution.limit_headers import (
    Advice,
    plain_headers,
    rate_limit_headers,
    retry_after,
)
from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.security.redaction import redact_url

_OVERLOADED = 529
_THROTTLED_BODY = ("secondary rate limit", "rate limit exceeded", "abuse detection")
_BODY_START = 4096  # bytes of a body that are read
_LONGEST_LOCATION = 200  # characters that a reason names


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
    if 300 <= status < 400 and (location := plain.get("location")):
        return GiveUp(f"{why}; a redirect to {_shown(location)}, which is not followed")
    return GiveUp(why)


def _is_throttled(status: int, plain: Mapping[str, str], body: bytes) -> bool:
    if status in (HTTPStatus.TOO_MANY_REQUESTS, _OVERLOADED):
        return True
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return bool(plain.get("retry-after"))
    if status != HTTPStatus.FORBIDDEN:
        return False
    if plain.get("retry-after") or plain.get("x-ratelimit-remaining") == "0":
        return True
    text = body[:_BODY_START].decode("utf-8", "ignore").lower()
    return any(words in text for words in _THROTTLED_BODY)


def _hold(why: str, headers: Mapping[str, str], *, now: datetime, max_hold: float) -> HoldUntil:
    """Until Retry-After, which takes precedence, else until the reset of what is used up; neither
    counts where it names no time to come.
    """
    for read, name in ((retry_after, "Retry-After"), (rate_limit_headers, "reset in")):
        said = read(headers, now=now, max_hold=max_hold)
        if said.until_s:
            return HoldUntil(said.until_s, f"{why}; {name} {_text(said)}")
        if said.until_s == 0:
            why = f"{why}; its {name.removesuffix(' in')} is already past"
        elif said.note:
            why = f"{why}; {said.note}"
    return HoldUntil(None, why)


def _shown(location: str) -> str:
    """A Location, as it may be shown: HTTP reads its bytes as Latin-1, and servers write UTF-8."""
    with suppress(ValueError):
        location = location.encode("latin-1").decode()
    text = "".join(char if char.isprintable() else "?" for char in redact_url(location))
    return text if len(text) <= _LONGEST_LOCATION else f"{text[:_LONGEST_LOCATION]}..."


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
