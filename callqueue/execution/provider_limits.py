"""What a provider says of its limits in an answer, and the default verdict of a rule.

In: a status, headers, the beginning of a body, the time. Out: an outcome, or a hold. Pure: no
Django, no clock. What a provider says may only tighten what the limits say, lasts at most
`max_hold`, and never raises, whatever it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from urllib.parse import urlsplit

from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded

_OVERLOADED = 529
_THROTTLED_BODY = ("secondary rate limit", "rate limit exceeded", "abuse detection")
_BODY_START = 4096
_YEAR = 366 * 86400.0
_CLOCKS_APART = 86400.0
_EPOCH_FROM, _EPOCH_TOO_FINE_FROM = 1e9, 1e12
_LONGEST_DATE = 100
_LONGEST_FIELD = 2000

_NUMBER = re.compile(r"\+?([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,4})?)")
_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,12})?(?:ms|[dhms]))+")
_DURATION_PART = re.compile(r"([0-9.]+)(ms|[dhms])")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LISTED = re.compile(
    r"[A-Za-z]{3,9},[^,]*|[^,]+"
)  # "Fri, 20 Nov 2026 12:00:00 GMT" has a comma of its own
_JAVASCRIPT_ZONE = re.compile(r"GMT(?=[+-][0-9]{4})|\(.*")
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_MEMBERS = re.compile(rf'(?:{_QUOTED}|[^",])+')
_PARAMETERS = re.compile(rf'(?:{_QUOTED}|[^";])+')
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


@dataclass(frozen=True)
class Advice:
    """What the headers say. `until_s`: for how many seconds from now nothing is to go; None where
    they ask for no hold.

    `note` says what was clamped or ignored; it holds no text of the headers, and of their numbers
    only whole seconds.
    """

    until_s: float | None = None
    remaining: int | None = None
    limit: int | None = None
    note: str = ""


@dataclass(frozen=True)
class _Told:
    """One limit as an answer tells it: what is left, the seconds until there is more, the size."""

    remaining: int | None
    reset: float | None
    limit: int | None


def verdict(
    status: int,
    headers: Mapping[str, str],
    body_start: bytes | str,
    *,
    retry_statuses: Collection[int],
    now: datetime,
    max_hold: float,
    method: str,
) -> Outcome:
    """The default verdict on an answer: success, a hold, a retry or the end. It is the same for
    every `method`.

    A throttled answer is a 429 (RFC 6585 section 4), a 503 with Retry-After (RFC 9110 section
    15.6.4), a 529 (Anthropic's overloaded_error, Qualys SSL Labs), or GitHub's 403 ("Rate limits
    for the REST API": a Retry-After, x-ratelimit-remaining: 0, or a body that names a rate limit).
    Without a usable time the hold lasts as long as the rule's backoff (None).
    """
    if 200 <= status < 300:
        return Succeeded()
    plain, why = _plain(headers), _phrase(status)
    if _is_throttled(status, plain, body_start):
        return _hold(why, plain, now=_aware(now), max_hold=max_hold)
    if status in retry_statuses:
        return RetryLater(why)
    if 300 <= status < 400 and "location" in plain:
        return GiveUp(f"{why}; redirect {_to_host(plain['location'])}not followed")
    return GiveUp(why)


def tightening(
    status: int, headers: Mapping[str, str], *, now: datetime, max_hold: float
) -> HoldUntil | None:
    """The hold that an answer of any `status`, a success too, asks for: nothing remains until the
    reset it names.
    """
    if not any(
        "rate" in name.lower() for name in headers
    ):  # most answers say nothing of limits, and cost no parsing
        return None
    advice = rate_limit_headers(headers, now=now, max_hold=max_hold)
    if not advice.until_s:
        return None
    return HoldUntil(advice.until_s, f"nothing remains for {_text(advice)}")


def retry_after(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """Retry-After (RFC 9110 section 10.2.3): seconds, or a date in one of the three forms of
    section 5.6.7.

    Read leniently: decimals, ISO 8601 dates and durations such as 6m0s too; of several values the
    longest. 0 is usable. A date counts from the answer's own Date where there is a sane one, since
    the provider's clock wrote both; Date has whole seconds, so that a hold is up to a second longer
    than meant, never shorter.
    """
    return _retry_after(_plain(headers), now=_aware(now), max_hold=max_hold)


def rate_limit_headers(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """What the RateLimit family of headers says: a hold where nothing remains, until the latest
    reset; else none.

    Read are `RateLimit` with `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-11, May 2026, and the older forms
    `default;r=0;t=5` and `limit=1, remaining=0, reset=5`), and every family of ...RateLimit...-Remaining, -Reset,
    -Reset-After and -Limit: RateLimit-*, X-RateLimit-*, X-Rate-Limit-*, -Reset-After (Discord, "Rate Limits"),
    -Remaining-Requests and -Tokens (OpenAI, "Rate limits": durations such as 6m0s; they name the time until all of the
    limit is back), anthropic-ratelimit-requests-* (RFC 3339 dates). A reset is seconds, an epoch in seconds (GitHub)
    or finer, a date, or a duration. On an answer from a cache they are ignored (the draft's section 7.3).
    """
    plain, now = _plain(headers), _aware(now)
    if (_number(plain.get("age", "")) or 0) > 0:
        return Advice(note="an answer from a cache")
    return _tightest(_told(plain, now), max_hold)


def _is_throttled(status: int, plain: Mapping[str, str], body_start: bytes | str) -> bool:
    if status in (HTTPStatus.TOO_MANY_REQUESTS, _OVERLOADED):
        return True
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "retry-after" in plain
    if status != HTTPStatus.FORBIDDEN:
        return False
    if "retry-after" in plain or _count(plain.get("x-ratelimit-remaining", "")) == 0:
        return True
    start = (body_start or "")[:_BODY_START]
    text = start.decode("utf-8", "ignore") if isinstance(start, bytes) else start
    return any(words in text.lower() for words in _THROTTLED_BODY)


def _hold(why: str, plain: Mapping[str, str], *, now: datetime, max_hold: float) -> HoldUntil:
    """Until Retry-After, which takes precedence (the draft's section 7), or else until the reset of
    what is used up.
    """
    asked = _retry_after(plain, now=now, max_hold=max_hold)
    if asked.until_s is not None:
        return HoldUntil(asked.until_s, f"{why}; Retry-After {_text(asked)}")
    told = _told(plain, now)
    if all(limit.remaining is None for limit in told):
        told = [
            replace(limit, remaining=0) for limit in told
        ]  # it refused: nothing remains, though it does not say so
    reset = _tightest(told, max_hold)
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


def _retry_after(plain: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    value = plain.get("retry-after")
    if value is None:
        return Advice()
    found = [
        wait for wait in _waits(value, _reference(plain, now), epochs=False) if wait is not None
    ]
    if not found:
        return Advice(note="its Retry-After is unusable")
    until_s, note = _clamped(max(found), max_hold)
    return Advice(until_s, note=note)


def _tightest(told: list[_Told], max_hold: float) -> Advice:
    """Of the limits with nothing left the one with the latest reset; else the one with the least
    left, and no hold.
    """
    counted = [limit for limit in told if limit.remaining is not None]
    if not counted:
        return Advice()
    least = min(counted, key=lambda limit: (limit.remaining, -_or_never(limit.reset)))
    if least.remaining != 0:
        return Advice(None, least.remaining, least.limit)
    if least.reset is None:
        return Advice(
            None, 0, least.limit, "nothing remains, and no reset is named that can be read"
        )
    until_s, note = _clamped(least.reset, max_hold)
    return Advice(until_s, 0, least.limit, note)


def _or_never(reset: float | None) -> float:
    return float("-inf") if reset is None else reset


def _told(plain: Mapping[str, str], now: datetime) -> list[_Told]:
    return [*_structured(plain), *_families(plain, _reference(plain, now))]


def _structured(plain: Mapping[str, str]) -> Iterator[_Told]:
    """RateLimit: "name";r=0;t=5 with RateLimit-Policy: "name";q=100;w=60. Without t, the policy's
    whole window.
    """
    value = plain.get("ratelimit", "")
    policies = dict(_members(plain.get("ratelimit-policy", "")))
    flat: dict[str, str] = {}
    for name, found in _members(value):
        if "=" in name:
            flat |= dict([name.split("=", 1)]) | found
        policy = policies.get(name, {})
        window = (
            "" if policy.get("qu", "").strip('"') == "concurrent-requests" else policy.get("w", "")
        )
        if "r" in found:
            reset = _number(found["t"]) if "t" in found else _number(window)
            yield _Told(_count(found["r"]), reset, _count(policy.get("q", "")))
    if flat:
        yield _Told(
            _count(flat.get("remaining", "")),
            _number(flat.get("reset", "")),
            _count(flat.get("limit", "")),
        )


def _members(value: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The members of a structured list (RFC 9651), each with its parameters; leniently, without a
    look at types.
    """
    for member in _MEMBERS.findall(value):
        name, *parameters = _PARAMETERS.findall(member) or [""]
        split = (parameter.strip().partition("=") for parameter in parameters)
        yield name.strip(), {key.strip().lower(): found.strip() for key, _, found in split}


def _families(plain: Mapping[str, str], reference: datetime) -> Iterator[_Told]:
    """Headers of one name but for the word remaining, reset, reset-after or limit tell of one
    limit.
    """
    families: dict[str, dict[str, str]] = {}
    for name, value in plain.items():
        family, role = _role(name)
        if role:
            families.setdefault(family, {})[role] = value
    for roles in families.values():
        counts = [_count(part) for part in roles.get("remaining", "").split(",")]
        waits = _waits(roles.get("reset-after", ""), reference, epochs=False)
        if all(wait is None for wait in waits):
            waits = _waits(roles.get("reset", ""), reference, epochs=True)
        limit = _count(re.split("[,;]", roles.get("limit", ""), maxsplit=1)[0])
        if len(counts) != len(
            waits
        ):  # a header sent twice has two values: paired where both were, else the strictest
            counts = [min((count for count in counts if count is not None), default=None)]
            waits = [max((wait for wait in waits if wait is not None), default=None)]
        yield from (_Told(count, wait, limit) for count, wait in zip(counts, waits, strict=True))


def _role(name: str) -> tuple[str, str]:
    """x-ratelimit-reset-tokens is the reset of the family x-ratelimit-tokens; no role for headers
    of other names.
    """
    words = name.replace("rate-limit", "rate_limit").split("-")
    if "ratelimit" not in words and "rate_limit" not in words:
        return "", ""
    for role in ("remaining", "reset", "limit"):
        if role in words:
            at = words.index(role)
            width = 2 if role == "reset" and words[at + 1 : at + 2] == ["after"] else 1
            return "-".join(words[:at] + words[at + width :]), "-".join(words[at : at + width])
    return "", ""


def _waits(value: str, reference: datetime, *, epochs: bool) -> list[float | None]:
    """Each of the values as seconds from now, None for what cannot be read."""
    return [_wait(part, reference, epochs=epochs) for part in _LISTED.findall(value)]


def _wait(value: str, reference: datetime, *, epochs: bool) -> float | None:
    text = value.strip(' \t"')
    number = _number(text)
    if number is not None:
        return _since_epoch(number, reference) if epochs and number >= _EPOCH_FROM else number
    if len(text) > _LONGEST_DATE:
        return None
    if _DURATION.fullmatch(text):
        return sum(float(amount) * _SECONDS[unit] for amount, unit in _DURATION_PART.findall(text))
    date = _date(text)
    return None if date is None else (date - reference).total_seconds()


def _since_epoch(number: float, reference: datetime) -> float:
    """Seconds from `reference` to an epoch in seconds, or in milli-, micro- or nanoseconds by its
    size.
    """
    for _ in range(3):
        number = number / 1000 if number >= _EPOCH_TOO_FINE_FROM else number
    return number - reference.timestamp()


def _number(value: str) -> float | None:
    """A number that is not negative, infinity where it is too large for a float; None for anything
    else.
    """
    match = _NUMBER.fullmatch(value.strip(" \t"))
    return float(match[1]) if match else None


def _count(value: str) -> int | None:
    """Whole units; less than one is none. A negative count, as Azure sends for "unknown", says
    nothing.
    """
    number = _number(value)
    return None if number is None else int(min(number, 1e15))


def _date(text: str) -> datetime | None:
    """An HTTP date in any of its three forms, JavaScript's form or ISO 8601; in UTC where it names
    no zone.
    """
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return _aware(parse(_JAVASCRIPT_ZONE.sub("", text).strip()))
        except Exception:  # many kinds: these parsers were not written for what strangers send
            continue
    return None


def _reference(plain: Mapping[str, str], now: datetime) -> datetime:
    """The provider's clock: the answer's Date, unless it is more than a day from ours."""
    date = _date(plain.get("date", "")[:_LONGEST_DATE])
    return date if date is not None and abs((date - now).total_seconds()) <= _CLOCKS_APART else now


def _aware(moment: datetime) -> datetime:
    return moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)


def _clamped(seconds: float, max_hold: float) -> tuple[float, str]:
    if seconds < 0:
        return 0.0, "clamped; it named a moment that is past"
    if seconds <= max_hold:
        return float(seconds), ""
    return float(
        max_hold
    ), f"clamped; it named {'more than a year' if seconds > _YEAR else f'{seconds:.0f} s'}"


def _text(advice: Advice) -> str:
    note = f" ({advice.note})" if advice.note else ""
    return f"{round(advice.until_s or 0.0, 3):.12g} s{note}"


def _plain(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers under lowercase names, cut to a sane length; those that differ by case only are
    one list.
    """
    plain: dict[str, str] = {}
    for name, value in (headers or {}).items():
        key, text = _decoded(name).strip().lower(), _decoded(value).strip()[:_LONGEST_FIELD]
        if text:
            plain[key] = f"{plain[key]}, {text}" if key in plain else text
    return plain


def _decoded(text: object) -> str:
    return text.decode("latin-1") if isinstance(text, bytes) else str(text)


def _phrase(status: int) -> str:
    if status == _OVERLOADED:
        return f"{status} Site is overloaded"
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
