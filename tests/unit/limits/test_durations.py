"""Durations as operators type them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from callqueue.limits.durations import WrongDuration, parse_duration


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("4w", timedelta(weeks=4)),
        ("0s", timedelta(0)),
        (" 1h ", timedelta(hours=1)),
    ],
)
def test_a_number_and_a_unit_is_a_duration(text: str, meant: timedelta) -> None:
    assert parse_duration(text) == meant


@pytest.mark.parametrize(
    "text",
    ["", "7", "d", "-1h", "1.5h", "2 hours", "1h30m", "7D", "١h", "1y", "1e3s", "9" * 13 + "s"],
)
def test_anything_else_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(WrongDuration, match='as in "90s"'):
        parse_duration(text)
    with pytest.raises(WrongDuration, match="longer than ten years"):
        parse_duration("999999999w")
