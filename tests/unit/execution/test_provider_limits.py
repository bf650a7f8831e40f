"""What providers say in their answers, and what the default verdict makes of it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requests.structures import CaseInsensitiveDict

from callqueue.execution.judging import (
    advice_of_rate_limits,
    advice_of_retry_after,
    default_verdict,
)
from callqueue.outcome import OUTCOMES, GiveUp, HoldUntil, RetryLater, Succeeded
from tests.support.length import examples

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
RETRY = (408, 425, 429, 500, 502, 503, 504)


def judge(status: int, headers: dict[str, str] | None = None) -> object:
    return default_verdict(status, headers or {}, retry_statuses=RETRY, now=NOW, max_hold=21600)


LEFT_NONE = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9"}


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [
        (200, Succeeded, {}),
        (503, RetryLater, {"Retry-After": ""}),
        (503, HoldUntil, {"Retry-After": "5"}),
        (503, HoldUntil, {"Retry-After": "soon"}),
        (502, RetryLater, {"Retry-After": "5"}),
        *[(status, GiveUp, {}) for status in (100, 403, 501, 529)],
        *[(status, GiveUp, LEFT_NONE) for status in (403, 404)],
        (403, GiveUp, {"Retry-After": "60"}),
    ],
)
def test_the_default_verdict(status: int, kind: type, headers: dict[str, str]) -> None:
    assert isinstance(judge(status, headers), kind)


TOO_MANY, PAST, UNUSABLE = "429 Too Many Requests", "is already past", "its Retry-After is unusable"


@pytest.mark.parametrize(
    ("headers", "until", "why"),
    [
        ({}, None, ""),
        ({"Retry-After": "30"}, 30.0, "Retry-After 30 s"),
        ({"Retry-After": "30000"}, 21600.0, "Retry-After 21600 s (clamped; it named 30000 s)"),
        ({"Retry-After": "0"}, None, f"its Retry-After {PAST}"),
        ({"Retry-After": "s3cret"}, None, UNUSABLE),
        ({"Retry-After": "5", **LEFT_NONE}, 5.0, "Retry-After 5 s"),
        ({"Retry-After": "0", **LEFT_NONE}, 9.0, f"its Retry-After {PAST}; reset in 9 s"),
        ({"Retry-After": "soon", **LEFT_NONE}, 9.0, f"{UNUSABLE}; reset in 9 s"),
        (LEFT_NONE, 9.0, "reset in 9 s"),
        ({**LEFT_NONE, "X-RateLimit-Reset": "0"}, None, f"its reset {PAST}"),
        ({"RateLimit-Reset": "9"}, 9.0, "reset in 9 s"),
    ],
)
def test_a_refusal_holds_until_the_time_it_names_or_for_the_backoff(
    headers: dict[str, str], until: float | None, why: str
) -> None:
    assert judge(429, headers) == HoldUntil(until, f"{TOO_MANY}; {why}" if why else TOO_MANY)


@pytest.mark.parametrize(
    ("status", "location", "why"),
    [
        (503, None, "503 Service Unavailable"),
        (799, None, "799"),
        (302, "", "302 Found"),
        (302, "https://me:s3cret@other.example/?token=s3cret", "302 Found; a redirect to https://[redacted]@other.example/?token=[redacted]"),
        (302, "/elsewhere?token=s3cret", "302 Found; a redirect to /elsewhere?token=[redacted]"),
        (307, "/" + "x" * 9000, f"307 Temporary Redirect; a redirect to /{'x' * 199}..."),
        (301, "/a\x1b[31m\u202eb\nc", "301 Moved Permanently; a redirect to /a?[31m?b?c"),
        (308, "/caf\u00c3\u00a9", "308 Permanent Redirect; a redirect to /café"),
        (302, "http://[", "302 Found; a redirect to http://["),
    ],
)  # fmt: skip
def test_the_reason_is_short_and_repeats_no_text_of_a_header_but_a_location(
    status: int, location: str | None, why: str
) -> None:
    said = judge(status, {} if location is None else {"Location": location})
    why = f"{why}, which is not followed" if "redirect" in why else why
    assert said == (RetryLater(why) if status == 503 else GiveUp(why))


NAMES = st.sampled_from(
    ["Retry-After", "retry-after", "Date", "Age", "Location", "RateLimit", "RateLimit-Policy", "RateLimit-Reset",
     "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset", "X-RateLimit-Reset-After",
     "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens", "ratelimit-", "-rate-limit-reset-after"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["0", "-1", "1e309", "6m0s", "9" * 400, "Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 01 Jan 0001 00:00:00 +2359", "GMT",
     "0001-01-01T00:00:00+23:59", '"a";r=0;t=5', '"', "\\", ";", ",", "=", "remaining=0", "https://[", "\x00", "\u2028", " "]
)  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=60),
    st.lists(WORDS, max_size=6).map("".join),
    st.from_regex(r'"[a-z]{0,3}";r=-?\d{1,20};t=-?\d{1,20}'),
    st.integers().map(str),
    st.datetimes().map(str),
    st.none(),
    st.binary(max_size=20),
)
HEADERS = st.dictionaries(NAMES, VALUES)
MOMENTS = st.datetimes(timezones=st.one_of(st.none(), st.just(UTC)))


@settings(max_examples=examples(100, 300), deadline=None)
@given(
    status=st.integers(-1, 1000) | st.integers(200, 299),
    headers=HEADERS,
    now=MOMENTS,
)
def test_no_header_is_too_strange(status: int, headers: Any, now: datetime) -> None:
    """And nothing that a success says is a reason to hold: the limits count by themselves."""
    outcome = default_verdict(status, headers, retry_statuses=RETRY, now=now, max_hold=21600)
    assert isinstance(outcome, OUTCOMES)
    assert isinstance(outcome, Succeeded) is (200 <= status < 300)
    if isinstance(outcome, HoldUntil) and outcome.until is not None:
        assert 0 < outcome.until <= 21600  # type: ignore[operator]
    if not isinstance(outcome, Succeeded):
        assert len(outcome.why) < 350
        assert outcome.why.isprintable()


@given(
    text=st.text(alphabet="abcdefgk", min_size=4, max_size=12),
    name=NAMES,
    status=st.sampled_from([403, 404, 429, 503, 529]),
)
def test_no_reason_repeats_what_a_header_holds(text: str, name: str, status: int) -> None:
    secret = f"zq{text}"
    headers = {name: f'"{secret}";r=0;t=4, {secret}', "X-RateLimit-Remaining": "0"}
    assert secret not in judge(status, headers).why  # type: ignore[attr-defined]


READ = ["Retry-After", "RateLimit", "RateLimit-Policy", "Location", "Date", "X-RateLimit-Remaining",
        "X-RateLimit-Reset"]  # fmt: skip
UNITS = ['"', '\\"', '"\\', '"a', 'a"\\",', ";", ",", "9", "a,", "1m", "Fri, ", "a;=", "Fri, 20 Nov 2026 12:00:00 GMT,"]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_headers_of_megabytes_are_read_at_once(unit: str) -> None:
    headers, started = dict.fromkeys(READ, unit * 10**6), time.process_time()
    judge(429, headers)
    judge(302, headers)
    assert time.process_time() - started < 3


# --- Headers

CLAMPED = "clamped; it named "


def date(moment: datetime) -> str:
    return format_datetime(moment, usegmt=True)


@pytest.mark.parametrize(
    ("value", "seconds", "note"),
    [
        ("30", 30.0, ""),
        ("0", 0.0, ""),
        ("1.5", 1.5, ""),
        (" 7 ", 7.0, ""),
        (date(NOW + timedelta(seconds=90)), 90.0, ""),
        ("Friday, 20-Nov-26 12:01:00 GMT", 60.0, ""),
        ("Fri Nov 20 12:01:00 2026", 60.0, ""),
        (date(NOW - timedelta(hours=1)), 0.0, ""),
        ("100000", 21600, f"{CLAMPED}100000 s"),
        ("99999999999999999999", 21600, f"{CLAMPED}1e+20 s"),
        ("9" * 5000, 21600, f"{CLAMPED}inf s"),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 21600, None),
        ("Fri, 31 Dec 9999 23:59:59 -0100", 21600, None),
        *[
            (value, None, UNUSABLE)
            for value in ("soon", "6m0s", "10, 20", "nan", "inf", "٣٠", "-5")
        ],
        ("", None, ""),
    ],
)
def test_retry_after_in_seconds_or_as_a_date(
    value: str, seconds: float | None, note: str | None
) -> None:
    """And what was clamped or ignored is told."""
    for headers in ({"Retry-After": value}, CaseInsensitiveDict({"rEtry-aFter": value})):
        advice = advice_of_retry_after(headers, now=NOW, max_hold=21600)
        assert advice.until_s == seconds and note in (advice.note, None)


@pytest.mark.parametrize(("ahead", "by"), [(timedelta(minutes=10), 5.0), (timedelta(days=2), 60)])
def test_a_date_is_counted_from_the_providers_own_clock(ahead: timedelta, by: float) -> None:
    """A date of another day is not their clock."""
    later = {"Date": date(NOW + ahead), "retry-after": date(NOW + ahead + timedelta(seconds=5))}
    assert advice_of_retry_after(later, now=NOW, max_hold=60).until_s == by
    epoch = str(int(NOW.timestamp()) + 30)
    headers = {"Date": date(NOW), "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": epoch}
    for ours in (NOW - ahead, NOW, NOW + ahead):
        until = advice_of_rate_limits(headers, now=ours, max_hold=60).until_s
        assert until == 30.0 or ahead > timedelta(days=1)


EPOCH = int(NOW.timestamp()) + 30


@pytest.mark.parametrize(
    ("reset", "seconds"),
    [
        ("9", 9.0),
        ("1.25", 1.25),
        (str(EPOCH), 30.0),
        (str(EPOCH * 1000), 30.0),
        ("2026-11-20T12:00:07+00:00", 7.0),
        ("2026-11-20T12:00:07Z", 7.0),
        ("Fri, 20 Nov 2026 12:00:09 GMT", 9.0),
        ("6m0s", None),
        ("whenever", None),
    ],
)
@pytest.mark.parametrize(
    "family", ["X-RateLimit-{}", "X-Rate-Limit-{}", "RateLimit-{}", "anthropic-ratelimit-tokens-{}"]
)
def test_nothing_remaining_is_a_hold_until_the_reset(
    family: str, reset: str, seconds: float | None
) -> None:
    for left in ("0", "0.9"):
        headers = {family.format("remaining"): left, family.format("reset"): reset}
        assert advice_of_rate_limits(headers, now=NOW, max_hold=21600).until_s == seconds


def left(**resets: tuple[str, str]) -> dict[str, str]:
    """What remains of each unit, and when it is reset."""
    headers = {}
    for unit, (remaining, reset) in resets.items():
        headers |= {f"x-ratelimit-remaining-{unit}": remaining, f"x-ratelimit-reset-{unit}": reset}
    return headers


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (left(tokens=("1", "360")), None),
        (left(requests=("0", "1"), tokens=("0", "90.5"), images=("4", "7200")), 90.5),
        (left(tokens=("-1", "5")), 5.0),
        ({"X-RateLimit-Remaining-Minute": "0", "RateLimit-Reset": "30"}, None),
        ({"X-RateLimit-Limit": "10", "X-RateLimit-Reset": "30"}, 30.0),
        ({"RateLimit": '"default";r=0;t=5', "RateLimit-Policy": '"default";q=10;w=60'}, None),
        ({"RateLimit-Remaining": "9" * 400, "RateLimit-Reset": "5"}, None),
        ({"RateLimit-Remaining": "many", "RateLimit-Reset": "5"}, 5.0),
        ({"X-Items-Remaining": "0", "X-Items-Reset": "5"}, None),
        ({"X-RateLimit-Remaining": "0"}, None),
        ({}, None),
    ],
)
def test_the_latest_reset_of_the_families_that_are_used_up_counts(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert advice_of_rate_limits(headers, now=NOW, max_hold=21600).until_s == seconds
