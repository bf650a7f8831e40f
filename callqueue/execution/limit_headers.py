"""The headers in which a provider tells its limits: Retry-After and the RateLimit family.

Headers and the time enter; advice leaves: for how long nothing is to go. Pure: no Django, no clock.
Never raises, whatever the headers hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from callqueue.execution.header_values import (
    aware,
    clock_of,
    count_of,
    members_of,
    number_of,
    plain_headers,
    waits_of,
)

_YEAR = 366 * 86400.0


@dataclass(frozen=True)
class Advice:
    """What the headers say. `until_s`: for how many seconds from now nothing is to go; None where
    they ask for no hold.

    `note` says what was clamped or ignored; it holds no text of the headers, and of their numbers
    only whole seconds.
    """

    until_s: float | None = None
    remaining: int | None = None
    note: str = ""


@dataclass(frozen=True)
class _Told:
    """One limit as an answer tells it: what is left, and the seconds until there is more."""

    remaining: int | None
    reset: float | None


def retry_after(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """Retry-After (RFC 9110 section 10.2.3): seconds, or a date in one of the three forms of
    section 5.6.7.

    Read leniently: decimals, ISO 8601 dates and durations such as 6m0s too; of several values the
    longest. 0 is usable. A date counts from the answer's own Date where there is a sane one, since
    the provider's clock wrote both; Date has whole seconds, so that a hold is up to a second longer
    than meant, never shorter.
    """
    plain = plain_headers(headers)
    value = plain.get("retry-after")
    if value is None:
        return Advice()
    waits = waits_of(value, clock_of(plain, aware(now)), epochs=False)
    found = [wait for wait in waits if wait is not None]
    if not found:
        return Advice(note="its Retry-After is unusable")
    until_s, note = _clamped(max(found), max_hold)
    return Advice(until_s, note=note)


def rate_limit_headers(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """What the RateLimit family of headers says: a hold where nothing remains, until the latest
    reset; else none.

    Read are:

    - `RateLimit` with `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-11, May 2026), and
      its older forms `default;r=0;t=5` and `limit=1, remaining=0, reset=5`;
    - every family of ...RateLimit...-Remaining, -Reset, -Reset-After and -Limit: RateLimit-*,
      X-RateLimit-*, X-Rate-Limit-*, -Reset-After (Discord, "Rate Limits"), -Remaining-Requests and
      -Tokens (OpenAI, "Rate limits": durations such as 6m0s, the time until all of the limit is
      back), anthropic-ratelimit-requests-* (RFC 3339 dates).

    A reset is seconds, an epoch in seconds (GitHub) or finer, a date, or a duration. On an answer
    from a cache all of them are ignored (the draft's section 7.3).
    """
    plain, now = plain_headers(headers), aware(now)
    if (number_of(plain.get("age", "")) or 0) > 0:
        return Advice(note="an answer from a cache")
    return _tightest(_told(plain, now), max_hold)


def reset_of_refusal(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """The RateLimit family of a refusal: where no header says what remains, nothing does."""
    told = _told(plain_headers(headers), aware(now))
    if all(limit.remaining is None for limit in told):
        told = [replace(limit, remaining=0) for limit in told]
    return _tightest(told, max_hold)


def _told(plain: Mapping[str, str], now: datetime) -> list[_Told]:
    return [*_structured(plain), *_families(plain, clock_of(plain, now))]


def _structured(plain: Mapping[str, str]) -> Iterator[_Told]:
    """RateLimit: "name";r=0;t=5 with RateLimit-Policy: "name";w=60. Without t, the whole window."""
    value = plain.get("ratelimit", "")
    policies = dict(members_of(plain.get("ratelimit-policy", "")))
    flat: dict[str, str] = {}
    for name, found in members_of(value):
        if "=" in name:
            flat |= dict([name.split("=", 1)]) | found
        policy = policies.get(name, {})
        is_concurrency = policy.get("qu", "").strip('"') == "concurrent-requests"
        window = "" if is_concurrency else policy.get("w", "")
        if "r" in found:
            reset = number_of(found["t"]) if "t" in found else number_of(window)
            yield _Told(count_of(found["r"]), reset)
    if flat:
        yield _Told(count_of(flat.get("remaining", "")), number_of(flat.get("reset", "")))


def _families(plain: Mapping[str, str], clock: datetime) -> Iterator[_Told]:
    """Headers that differ only in remaining, reset, reset-after or limit tell of one limit."""
    families: dict[str, dict[str, str]] = {}
    for name, value in plain.items():
        family, role = _role(name)
        if role:
            families.setdefault(family, {})[role] = value
    for roles in families.values():
        yield from _family(roles, clock)


def _family(roles: Mapping[str, str], clock: datetime) -> Iterator[_Told]:
    """The limits of one family. A header sent twice has two values: counts and waits are paired
    where there are as many of both, else the strictest of each counts.
    """
    counts = [count_of(part) for part in roles.get("remaining", "").split(",")]
    waits = waits_of(roles.get("reset-after", ""), clock, epochs=False)
    if all(wait is None for wait in waits):
        waits = waits_of(roles.get("reset", ""), clock, epochs=True)
    if len(counts) != len(waits):
        counts = [min((count for count in counts if count is not None), default=None)]
        waits = [max((wait for wait in waits if wait is not None), default=None)]
    yield from (_Told(count, wait) for count, wait in zip(counts, waits, strict=True))


def _role(name: str) -> tuple[str, str]:
    """x-ratelimit-reset-tokens is the reset of x-ratelimit-tokens; other names have no role."""
    words = name.replace("rate-limit", "rate_limit").split("-")
    if "ratelimit" not in words and "rate_limit" not in words:
        return "", ""
    for role in ("remaining", "reset", "limit"):
        if role in words:
            at = words.index(role)
            width = 2 if role == "reset" and words[at + 1 : at + 2] == ["after"] else 1
            return "-".join(words[:at] + words[at + width :]), "-".join(words[at : at + width])
    return "", ""


def _tightest(told: list[_Told], max_hold: float) -> Advice:
    """Of used up limits the one with the latest reset; else the one with the least left."""
    counted = [limit for limit in told if limit.remaining is not None]
    if not counted:
        return Advice()
    least = min(counted, key=lambda limit: (limit.remaining, -_or_never(limit.reset)))
    if least.remaining != 0:
        return Advice(None, least.remaining)
    if least.reset is None:
        unread = "nothing remains, and no reset is named that can be read"
        return Advice(None, 0, unread)
    until_s, note = _clamped(least.reset, max_hold)
    return Advice(until_s, 0, note)


def _or_never(reset: float | None) -> float:
    return float("-inf") if reset is None else reset


def _clamped(seconds: float, max_hold: float) -> tuple[float, str]:
    if seconds < 0:
        return 0.0, "clamped; it named a moment that is past"
    if seconds <= max_hold:
        return float(seconds), ""
    named = "more than a year" if seconds > _YEAR else f"{seconds:.0f} s"
    return float(max_hold), f"clamped; it named {named}"
