"""The headers in which a provider names its limits: Retry-After, and the families
`...RateLimit...-Remaining` and `-Reset`.

Headers and the time enter; advice leaves. Pure: no Django, no clock. Never raises, whatever the
headers hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_CLOCKS_APART = 86400.0  # seconds beyond which an answer's Date tells nothing of its clock
_EPOCHS_FROM, _MILLISECONDS_FROM = 1e9, 1e12  # a reset from here on is no wait, but a moment
_MOST_LEFT = 1e15
_LONGEST, _LONGEST_DATE = 2000, 100  # characters of a value that are read
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_FAMILY = re.compile(r"rate-?limit")


@dataclass(frozen=True)
class Advice:
    """What the headers say. `until_s`: for how many seconds from now nothing is to go, None where
    they name no time; `note` says of it what was unusable or clamped, in no words of theirs.
    """

    until_s: float | None = None
    remaining: int | None = None
    note: str = ""


def plain_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers by lowercase name, cut to a sane length."""
    return {str(name).lower(): str(value).strip()[:_LONGEST] for name, value in headers.items()}


def retry_after(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """Retry-After (RFC 9110 section 10.2.3): seconds, or an HTTP date.

    A date counts from the answer's own Date where there is a sane one, since the provider's clock
    wrote both.
    """
    plain = plain_headers(headers)
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
    plain = plain_headers(headers)
    left, resets = dict[str, int](), dict[str, float]()
    for name, value in plain.items():
        if not _FAMILY.search(name):
            continue
        if "remaining" in name and (count := _number(value)) is not None:
            left[name.replace("remaining", "")] = int(min(count, _MOST_LEFT))
        elif "reset" in name and (wait := _wait(value, _clock(plain, now))) is not None:
            resets[name.replace("reset", "")] = wait
    used_up = [family for family in resets if not left or left.get(family) == 0]
    remaining = min(left.values(), default=None)
    if not used_up:
        return Advice(remaining=remaining)
    held = _held(max(resets[family] for family in used_up), max_hold)
    return Advice(held.until_s, remaining, held.note)


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
        try:
            return _aware(parse(text[:_LONGEST_DATE]))
        except Exception:  # many kinds: these parsers were not written for what strangers send
            continue
    return None


def _aware(moment: datetime) -> datetime:
    return moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)
