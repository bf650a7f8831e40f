"""What providers say of their limits in headers: Retry-After and the RateLimit family."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from requests.structures import CaseInsensitiveDict

from callqueue.execution.limit_headers import Advice, rate_limit_headers, retry_after

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
        ("2026-11-20T12:00:30Z", 30.0),
        ("6m0s", 360.0),
        ("10, 20", 20.0),
        ("30, Fri, 20 Nov 2026 12:00:45 GMT", 45.0),
        ("Fri, 20 Nov 2026 12:00:15 GMT, 30", 30.0),
        ("10, soon", 10.0),
        ("1e9", 21600),
        ("99999999999999999999", 21600),
        ("9" * 5000, 21600),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 21600),
        ("Fri, 31 Dec 9999 23:59:59 -0100", 21600),
        ("soon", None),
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
        ("1e300", "clamped; it named more than a year"),
        ("Fri, 20 Nov 2026 11:00:00 GMT", "clamped; it named a moment that is past"),
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
        {"Retry-After": "1", "retry-after": "3"},
    ):
        assert retry_after(headers, now=NOW, max_hold=60).until_s == 3.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"RateLimit": '"default";r=0;t=5'}, 5.0),
        ({"RateLimit": '"default";r=3;t=5'}, None),
        (
            {
                "RateLimit": '"burst";r=0;t=2, "daily";r=0;t=900',
                "RateLimit-Policy": '"burst";q=10;w=1',
            },
            900.0,
        ),
        ({"RateLimit": '"burst";r=0', "RateLimit-Policy": '"burst";q=10;w=60'}, 60.0),
        ({"RateLimit": '"burst";r=0;t=2, "daily";r=7;t=900'}, 2.0),
        ({"RateLimit": "default;r=0;t=5"}, 5.0),
        ({"RateLimit": '"a,b;c";pk=:dHJpYWwxMjEzMjM=:;r=0;t=5'}, 5.0),
        (
            {
                "RateLimit": '"job";r=0',
                "RateLimit-Policy": '"job";q=3;qu="concurrent-requests";w=60',
            },
            None,
        ),
        ({"RateLimit": '"a";r=0;t=-5'}, None),
        ({"RateLimit": "r=0;t=5"}, None),
        ({"RateLimit": "limit=100, remaining=0, reset=50"}, 50.0),
        ({"RateLimit": "limit=100, remaining=1, reset=50"}, None),
        (
            {
                "RateLimit-Limit": "100, 100;w=60",
                "RateLimit-Remaining": "0",
                "RateLimit-Reset": "5",
            },
            5.0,
        ),
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
        (
            {
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": str((int(NOW.timestamp()) + 30) * 10**9),
            },
            30.0,
        ),
        (
            {
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": "Fri Nov 20 2026 13:00:09 GMT+0100 (CET)",
            },
            9.0,
        ),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "Fri, 20 Nov 2026 12:00:09 GMT"}, 9.0),
        ({"X-RateLimit-Remaining": "5, 0", "X-RateLimit-Reset": "50, 7"}, 7.0),
        ({"X-RateLimit-Remaining": "5, 0", "X-RateLimit-Reset": "50"}, 50.0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset-After": "1.25"}, 1.25),
        (
            {
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset-After": "1.25",
                "X-RateLimit-Reset": "1470173023",
            },
            1.25,
        ),
        (
            {
                "anthropic-ratelimit-tokens-remaining": "0",
                "anthropic-ratelimit-tokens-reset": "2026-11-20T12:00:07Z",
            },
            7.0,
        ),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360.0),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "6m0s"}, None),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "1m30.5s",
                "x-ratelimit-remaining-images": "4",
                "x-ratelimit-reset-images": "2h",
            },
            90.5,
        ),
        ({"x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "5"}, None),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "30", "Age": "12"}, None),
        ({"X-RateLimit-Remaining-Minute": "0", "RateLimit-Reset": "30"}, None),
        ({"X-RateLimit-Limit": "10", "X-RateLimit-Reset": "30"}, None),
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


def test_the_limit_told_is_the_one_that_holds() -> None:
    headers = {
        "RateLimit": '"s";r=4;t=1, "d";r=0;t=50',
        "RateLimit-Policy": '"s";q=5;w=1, "d";q=900;w=86400',
    }
    assert rate_limit_headers(headers, now=NOW, max_hold=60) == Advice(50.0, 0)
    headers["RateLimit"] = '"s";r=4;t=1, "d";r=70;t=50'
    assert rate_limit_headers(headers, now=NOW, max_hold=60) == Advice(None, 4)
