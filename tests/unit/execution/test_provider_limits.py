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

from callqueue.execution.judging import rate_limit_headers, retry_after, verdict
from callqueue.outcome import OUTCOMES, GiveUp, HoldUntil, RetryLater, Succeeded

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
RETRY = (408, 425, 429, 500, 502, 503, 504)


def judge(status: int, headers: dict[str, str] | None = None) -> object:
    return verdict(status, headers or {}, retry_statuses=RETRY, now=NOW, max_hold=21600)


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (200, {}, Succeeded),
        (204, {}, Succeeded),
        (429, {}, HoldUntil),
        (503, {"Retry-After": "5"}, HoldUntil),
        (503, {}, RetryLater),
        (503, {"Retry-After": ""}, RetryLater),
        (503, {"Retry-After": "soon"}, HoldUntil),
        (502, {"Retry-After": "5"}, RetryLater),
        (529, {}, GiveUp),
        (500, {}, RetryLater),
        (501, {}, GiveUp),
        (404, {}, GiveUp),
        (302, {"Location": "https://elsewhere.example/x?token=1"}, GiveUp),
        (403, {}, GiveUp),
        (403, {"X-RateLimit-Remaining": "1", "X-RateLimit-Reset": "9"}, GiveUp),
        (
            404,
            {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9"},
            GiveUp,
        ),
        (304, {}, GiveUp),
        (100, {}, GiveUp),
        (403, {"Retry-After": "60"}, GiveUp),
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9"}, GiveUp),
        (799, {}, GiveUp),
    ],
)
def test_the_default_verdict(status: int, headers: dict[str, str], kind: type) -> None:
    assert isinstance(judge(status, headers), kind)


@pytest.mark.parametrize(
    ("headers", "until"),
    [
        ({"Retry-After": "0"}, None),
        ({"Retry-After": "Fri, 20 Nov 2026 11:59:59 GMT"}, None),
        ({"Retry-After": "0", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9"}, 9.0),
        ({"Retry-After": "0.25"}, 0.25),
        ({"Retry-After": "5", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "3600"}, 5.0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9"}, 9.0),
        ({"Retry-After": "soon", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9"}, 9.0),
        ({"X-RateLimit-Reset": "9"}, 9.0),
        ({"X-RateLimit-Remaining": "40", "X-RateLimit-Reset": "9"}, None),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "0"}, None),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
def test_a_refusal_holds_until_the_time_it_names_or_for_the_backoff(
    headers: dict[str, str], until: float | None
) -> None:
    outcome = judge(429, headers)
    assert isinstance(outcome, HoldUntil)
    assert (outcome.until, outcome.scope) == (until, None)


@pytest.mark.parametrize(
    ("status", "headers", "why"),
    [
        (429, {"Retry-After": "30"}, "429 Too Many Requests; Retry-After 30 s"),
        (429, {"Retry-After": "30000"}, "429 Too Many Requests; Retry-After 21600 s (clamped; it named 30000 s)"),
        (429, {"Retry-After": "0"}, "429 Too Many Requests; its Retry-After is already past"),
        (429, {"Retry-After": "s3cret"}, "429 Too Many Requests; its Retry-After is unusable"),
        (429, {"RateLimit-Reset": "9"}, "429 Too Many Requests; reset in 9 s"),
        (429, {"RateLimit-Reset": "0"}, "429 Too Many Requests; its reset is already past"),
        (429, {"Retry-After": "soon", "RateLimit-Reset": "9"}, "429 Too Many Requests; its Retry-After is unusable; reset in 9 s"),
        (503, {}, "503 Service Unavailable"),
        (404, {}, "404 Not Found"),
        (799, {}, "799"),
        (302, {"Location": "https://me:s3cret@other.example/?token=s3cret"}, "302 Found; a redirect to https://[redacted]@other.example/?token=[redacted], which is not followed"),
        (302, {"Location": "/elsewhere?token=s3cret"}, "302 Found; a redirect to /elsewhere?token=[redacted], which is not followed"),
        (307, {"Location": "/" + "x" * 9000}, f"307 Temporary Redirect; a redirect to /{'x' * 199}..., which is not followed"),
        (301, {"Location": "/a\x1b[31m\u202eb\nc"}, "301 Moved Permanently; a redirect to /a?[31m?b?c, which is not followed"),
        (308, {"Location": "/caf\u00c3\u00a9"}, "308 Permanent Redirect; a redirect to /café, which is not followed"),
        (302, {"Location": ""}, "302 Found"),
        (302, {"Location": "http://["}, "302 Found; a redirect to http://[, which is not followed"),
        (304, {}, "304 Not Modified"),
    ],
)  # fmt: skip
def test_the_reason_is_short_and_repeats_no_text_of_a_header_but_a_location(
    status: int, headers: dict[str, str], why: str
) -> None:
    assert judge(status, headers).why == why  # type: ignore[attr-defined]


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


@settings(max_examples=300, deadline=None)
@given(
    status=st.integers(-1, 1000),
    headers=HEADERS,
    now=MOMENTS,
)
def test_no_header_is_too_strange(status: int, headers: Any, now: datetime) -> None:
    outcome = verdict(status, headers, retry_statuses=RETRY, now=now, max_hold=21600)
    assert isinstance(outcome, OUTCOMES)
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


@given(status=st.integers(200, 299), headers=HEADERS)
def test_nothing_that_a_success_says_is_a_reason_to_hold(status: int, headers: Any) -> None:
    """That nothing remains, for one: the limits count by themselves."""
    assert judge(status, headers) == Succeeded()


@pytest.mark.parametrize(
    "unit",
    [
        '"',
        '\\"',
        '"\\',
        '"a',
        'a"\\",',
        ";",
        ",",
        "9",
        "a,",
        "1m",
        "Fri, ",
        "a;=",
        "Fri, 20 Nov 2026 12:00:00 GMT,",
    ],
)
def test_headers_of_megabytes_are_read_at_once(unit: str) -> None:
    headers = dict.fromkeys(
        [
            "Retry-After",
            "RateLimit",
            "RateLimit-Policy",
            "Location",
            "Date",
            "X-RateLimit-Remaining",
        ],
        unit * 10**6,
    )
    headers["X-RateLimit-Reset"] = unit * 10**6
    started = time.process_time()
    judge(429, headers)
    judge(302, headers)
    assert time.process_time() - started < 3


# --- Headers


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30", 30.0),
        ("0", 0.0),
        ("1.5", 1.5),
        (" 7 ", 7.0),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        ("Friday, 20-Nov-26 12:01:00 GMT", 60.0),
        ("Fri Nov 20 12:01:00 2026", 60.0),
        ((NOW - timedelta(hours=1)).strftime("%a, %d %b %Y %H:%M:%S GMT"), 0.0),
        ("99999999999999999999", 21600),
        ("9" * 5000, 21600),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 21600),
        ("Fri, 31 Dec 9999 23:59:59 -0100", 21600),
        ("soon", None),
        ("6m0s", None),
        ("10, 20", None),
        ("nan", None),
        ("inf", None),
        ("٣٠", None),
        ("-5", None),
        ("", None),
    ],
)
def test_retry_after_in_seconds_or_as_a_date(value: str, seconds: float | None) -> None:
    assert retry_after({"Retry-After": value}, now=NOW, max_hold=21600).until_s == seconds


def test_a_date_is_counted_from_the_providers_own_clock() -> None:
    theirs = NOW + timedelta(minutes=10)
    headers = {
        "Date": format_datetime(theirs, usegmt=True),
        "retry-after": format_datetime(theirs + timedelta(seconds=5), usegmt=True),
    }
    assert retry_after(headers, now=NOW, max_hold=60).until_s == 5.0


def test_a_date_of_another_day_is_not_their_clock() -> None:
    headers = {
        "Date": format_datetime(NOW - timedelta(days=2), usegmt=True),
        "Retry-After": format_datetime(NOW + timedelta(seconds=5), usegmt=True),
    }
    assert retry_after(headers, now=NOW, max_hold=60).until_s == 5.0


def test_a_clock_ten_minutes_off_changes_nothing_where_the_answer_has_a_date() -> None:
    headers = {
        "Date": format_datetime(NOW, usegmt=True),
        "X-RateLimit-Remaining": "0",
        "X-RateLimit-Reset": str(int(NOW.timestamp()) + 30),
    }
    for ours in (NOW - timedelta(minutes=10), NOW, NOW + timedelta(minutes=10)):
        assert rate_limit_headers(headers, now=ours, max_hold=60).until_s == 30.0


@pytest.mark.parametrize(
    ("value", "note"),
    [
        ("100000", "clamped; it named 100000 s"),
        ("9" * 400, "clamped; it named inf s"),
        ("-5", "its Retry-After is unusable"),
        ("30", ""),
    ],
)
def test_what_was_clamped_or_ignored_is_told(value: str, note: str) -> None:
    assert retry_after({"Retry-After": value}, now=NOW, max_hold=60).note == note


def test_names_are_read_in_any_case_and_of_any_mapping() -> None:
    for headers in (
        {"RETRY-AFTER": "3"},
        CaseInsensitiveDict({"rEtry-aFter": "3"}),
    ):
        assert retry_after(headers, now=NOW, max_hold=60).until_s == 3.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"X-Rate-Limit-Remaining": "0", "X-Rate-Limit-Reset": "9"}, 9.0),
        ({"RateLimit-Limit": "10", "RateLimit-Remaining": "0", "RateLimit-Reset": "12"}, 12.0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOW.timestamp()) + 30)}, 30.0),
        (
            {
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": str((int(NOW.timestamp()) + 30) * 1000),
            },
            30.0,
        ),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-11-20T12:00:07+00:00"}, 7.0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "Fri, 20 Nov 2026 12:00:09 GMT"}, 9.0),
        ({"X-RateLimit-Remaining": "0.9", "X-RateLimit-Reset": "1.25"}, 1.25),
        (
            {
                "anthropic-ratelimit-tokens-remaining": "0",
                "anthropic-ratelimit-tokens-reset": "2026-11-20T12:00:07Z",
            },
            7.0,
        ),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, None),
        ({"x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "360"}, None),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "90.5",
                "x-ratelimit-remaining-images": "4",
                "x-ratelimit-reset-images": "7200",
            },
            90.5,
        ),
        ({"x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "5"}, 5.0),
        ({"X-RateLimit-Remaining-Minute": "0", "RateLimit-Reset": "30"}, None),
        ({"X-RateLimit-Limit": "10", "X-RateLimit-Reset": "30"}, 30.0),
        ({"RateLimit": '"default";r=0;t=5', "RateLimit-Policy": '"default";q=10;w=60'}, None),
        ({"X-RateLimit-Remaining": "0"}, None),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "whenever"}, None),
        ({}, None),
    ],
)
def test_nothing_remaining_is_a_hold_until_the_reset(
    headers: dict[str, str], seconds: float | None
) -> None:
    until = rate_limit_headers(headers, now=NOW, max_hold=21600).until_s
    assert until == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("headers", "remaining"),
    [
        ({"X-RateLimit-Remaining": "41", "X-RateLimit-Limit": "60"}, 41),
        ({"x-ratelimit-remaining-requests": "9", "x-ratelimit-remaining-tokens": "7"}, 7),
        ({"RateLimit-Remaining": "9" * 400}, 10**15),
        ({"RateLimit-Remaining": "-1"}, None),
        ({"RateLimit-Remaining": "many"}, None),
        ({"X-Items-Remaining": "3"}, None),
    ],
)
def test_the_least_that_is_left_is_told(headers: dict[str, str], remaining: int | None) -> None:
    advice = rate_limit_headers(headers, now=NOW, max_hold=60)
    assert (advice.until_s, advice.remaining) == (None, remaining)
