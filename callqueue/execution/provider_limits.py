"""The default verdict on an answer, and what a provider that refuses says of its limits in headers:
Retry-After, and the families `...RateLimit...-Remaining` and `-Reset`.

In: a status, headers, the time. Out: an outcome. Pure: no Django, no
clock. What a provider says may only tighten what the limits say, lasts at most `max_hold`, and
never raises, whatever it is. Only a refusal is a reason to hold: a success with which nothing
remains says what the limits know, later than they do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import NamedTuple

from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.security.redaction import redact_url

_LONGEST_LOCATION = 200  # characters that a reason names
_CLOCKS_APART = 86400.0  # seconds beyond which an answer's Date tells nothing of its clock
_EPOCHS_FROM, _MILLISECONDS_FROM = 1e9, 1e12  # a reset from here on is no wait, but a moment
_MOST_LEFT = 1e15
_LONGEST, _LONGEST_DATE = 2000, 100  # characters of a value that are read
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_FAMILY = re.compile(r"rate-?limit")


class Advice(NamedTuple):
    """What the headers say. `until_s`: for how many seconds from now nothing is to go, None where
    they name no time; `note` says of it what was unusable or clamped, in no words of theirs.
    """

    until_s: float | None = None
    remaining: int | None = None
    note: str = ""


def verdict(
    status: int,
    headers: Mapping[str, str],
    *,
    retry_statuses: Collection[int],
    now: datetime,
    max_hold: float,
) -> Outcome:
    """The default verdict on an answer: success, a hold, a retry or the end.

    A throttled answer is a 429 (RFC 6585 section 4), or a 503 with Retry-After (RFC 9110 section
    15.6.4); what else a provider means by it, the rule's `classify` knows. Without a usable time
    the hold lasts as long as the rule's backoff (None).
    """
    if 200 <= status < 300:
        return Succeeded()
    plain, why = _plain(headers), _phrase(status)
    if _is_throttled(status, plain):
        return _hold(why, headers, now=now, max_hold=max_hold)
    if status in retry_statuses:
        return RetryLater(why)
    if 300 <= status < 400 and (location := plain.get("location")):
        return GiveUp(f"{why}; a redirect to {_shown(location)}, which is not followed")
    return GiveUp(why)


def retry_after(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """Retry-After (RFC 9110 section 10.2.3): seconds, or an HTTP date.

    A date counts from the answer's own Date where there is a sane one, since the provider's clock
    wrote both.
    """
    plain = _plain(headers)
    if not (value := plain.get("retry-after")):
        return Advice()
    wait = _number(value)
    if wait is None and (date := _date(value)) is not None:
        wait = (date - _clock(plain, now)).total_seconds()
    return Advice(note="its Retry-After is unusable") if wait is None else _held(wait, max_hold)


def rate_limit_headers(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """The RateLimit families of a refusal: nothing is to go until the latest reset of those that
    are used up, or of all where none says what remains.

    A family is the headers that differ only in remaining or reset: X-RateLimit-*, RateLimit-*,
    x-ratelimit-*-tokens, anthropic-ratelimit-requests-*. A reset is seconds, an epoch or a date.
    """
    plain = _plain(headers)
    left, resets = dict[str, int](), dict[str, float]()
    for name, value in plain.items():
        if not _FAMILY.search(name):
            continue
        if "remaining" in name and (count := _number(value)) is not None:
            left[name.replace("remaining", "")] = int(min(count, _MOST_LEFT))
        elif "reset" in name and (wait := _wait(value, _clock(plain, now))) is not None:
            resets[name.replace("reset", "")] = wait
    used_up = [wait for family, wait in resets.items() if not left or left.get(family) == 0]
    held = _held(max(used_up), max_hold) if used_up else Advice()
    return held._replace(remaining=min(left.values(), default=None))


def _plain(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers by lowercase name, cut to a sane length."""
    return {str(name).lower(): str(value).strip()[:_LONGEST] for name, value in headers.items()}


def _is_throttled(status: int, plain: Mapping[str, str]) -> bool:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return bool(plain.get("retry-after"))
    return status == HTTPStatus.TOO_MANY_REQUESTS


def _hold(why: str, headers: Mapping[str, str], *, now: datetime, max_hold: float) -> HoldUntil:
    """Until Retry-After, which takes precedence, else until the reset of what is used up; neither
    counts where it names no time to come.
    """
    for read, name in ((retry_after, "Retry-After"), (rate_limit_headers, "reset in")):
        until_s, _, note = read(headers, now=now, max_hold=max_hold)
        if until_s:
            seconds = f"{round(until_s, 3):.12g} s" + (f" ({note})" if note else "")
            return HoldUntil(until_s, f"{why}; {name} {seconds}")
        if until_s == 0:
            note = f"its {name.removesuffix(' in')} is already past"
        why = f"{why}; {note}" if note else why
    return HoldUntil(None, why)


def _held(seconds: float, max_hold: float) -> Advice:
    if seconds <= max_hold:
        return Advice(max(0.0, seconds))
    return Advice(float(max_hold), note=f"clamped; it named {seconds:.12g} s")


def _wait(value: str, clock: datetime) -> float | None:
    number = _number(value)
    if number is None:
        date = _date(value)
        return None if date is None else (date - clock).total_seconds()
    if number < _EPOCHS_FROM:
        return number
    return (number if number < _MILLISECONDS_FROM else number / 1000) - clock.timestamp()


def _number(value: str) -> float | None:
    return float(value) if _NUMBER.fullmatch(value) else None


def _clock(plain: Mapping[str, str], now: datetime) -> datetime:
    """The provider's clock: the answer's Date, unless it is more than a day from ours."""
    now, date = _aware(now), _date(plain.get("date", ""))
    return date if date is not None and abs((date - now).total_seconds()) <= _CLOCKS_APART else now


def _date(text: str) -> datetime | None:
    """An HTTP date, or one of RFC 3339; UTC without a zone."""
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        with suppress(Exception):  # many: these parsers were not written for what strangers send
            return _aware(parse(text[:_LONGEST_DATE]))
    return None


def _aware(moment: datetime) -> datetime:
    return moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)


def _shown(location: str) -> str:
    """A Location, as it may be shown: HTTP reads its bytes as Latin-1, and servers write UTF-8."""
    with suppress(ValueError):
        location = location.encode("latin-1").decode()
    text = "".join(char if char.isprintable() else "?" for char in redact_url(location))
    return text if len(text) <= _LONGEST_LOCATION else f"{text[:_LONGEST_LOCATION]}..."


def _phrase(status: int) -> str:
    with suppress(ValueError):
        return f"{status} {HTTPStatus(status).phrase}"
    return str(status)
