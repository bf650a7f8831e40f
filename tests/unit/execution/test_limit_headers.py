"""What providers that refuse say of their limits in headers: Retry-After and the RateLimit
families.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from requests.structures import CaseInsensitiveDict

from callqueue.execution.provider_limits import rate_limit_headers, retry_after

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


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
