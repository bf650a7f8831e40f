"""Durations and counts are said as people say them, in their own language."""

from __future__ import annotations

import re

import pytest
from django.utils import translation

from callqueue.look import words


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "just now"),
        (50, "in 50 seconds"),
        (11520, "in 3 hours and 12 minutes"),
        (-9, "just now"),
        (9, "in 9 seconds"),
        (-180, "3 minutes ago"),
        (7260, "in 2 hours and a minute"),
        (20.8 * 86400, "in 20 days"),
        (-3 * 86400, "3 days ago"),
        (1e12, "in more than a hundred years"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert words.from_now(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "english", "german"),
    [
        (0, "0 seconds", "0 Sekunden"),
        (0.85, "850 ms", "850 ms"),
        (1, "a second", "eine Sekunde"),
        (119, "119 seconds", "119 Sekunden"),
        (240, "4 minutes", "4 Minuten"),
        (12_000, "3 hours and 20 minutes", "3 Stunden und 20 Minuten"),
        (190_000, "2 days and 4 hours", "2 Tage und 4 Stunden"),
        (20.8 * 86400, "20 days", "20 Tage"),
        (1e12, "more than a hundred years", "mehr als hundert Jahre"),
    ],
)
def test_a_duration_is_said_in_the_readers_language(
    seconds: float, english: str, german: str
) -> None:
    assert words.duration(seconds) == english
    with translation.override("de"):
        assert words.duration(seconds) == german


def test_an_instant_is_said_in_the_readers_language() -> None:
    with translation.override("de-at"):
        assert words.from_now(3 * 86400) == "in 3 Tagen"
        assert words.from_now(-12_000) == "vor 3 Stunden und 20 Minuten"
        assert words.from_now(-1e12) == "vor mehr als hundert Jahren"


def test_a_language_that_nobody_has_words_for_is_english() -> None:
    with translation.override("cy"):
        assert words.duration(240) == "4 minutes"
    with translation.override(None):
        assert words.duration(240) == "4 minutes"


def test_counts_are_grouped() -> None:
    assert words.count(1234) == "1,234"
    with translation.override("de"):
        assert words.count(1234) == "1.234"


def test_one_of_a_unit_is_not_said_as_many() -> None:
    said = [words.duration(seconds) for seconds in range(0, 3 * words.DAY, 7)]
    assert [one for one in said if re.search(r"\b1 \w+s\b", one)] == []
