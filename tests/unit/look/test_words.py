"""Durations and counts are said as people say them, in their own language."""

from __future__ import annotations

import re

import pytest
from django.utils import translation

from callqueue.look import words

INSTANTS = {
    0: ("just now", "gerade eben"),
    -9: ("just now", "gerade eben"),
    9: ("in 9 seconds", "in 9 Sekunden"),
    11_520: ("in 3 hours and 12 minutes", "in 3 Stunden und 12 Minuten"),
    7260: ("in 2 hours and a minute", "in 2 Stunden und einer Minute"),
    -180: ("3 minutes ago", "vor 3 Minuten"),
    20.8 * 86400: ("in 20 days", "in 20 Tagen"),
    -3 * 86400: ("3 days ago", "vor 3 Tagen"),
    1e12: ("in more than a hundred years", "in mehr als hundert Jahren"),
}
DURATIONS = {
    0: ("0 seconds", "0 Sekunden"),
    0.85: ("850 ms", "850 ms"),
    1: ("a second", "eine Sekunde"),
    119: ("119 seconds", "119 Sekunden"),
    240: ("4 minutes", "4 Minuten"),
    12_000: ("3 hours and 20 minutes", "3 Stunden und 20 Minuten"),
    190_000: ("2 days and 4 hours", "2 Tage und 4 Stunden"),
    20.8 * 86400: ("20 days", "20 Tage"),
    1e12: ("more than a hundred years", "mehr als hundert Jahre"),
}


@pytest.mark.parametrize(("language", "place"), [("en", 0), ("de-at", 1), ("cy", 0), (None, 0)])
def test_times_are_said_in_the_readers_language(language: str | None, place: int) -> None:
    """In English, where nobody has words for it."""
    with translation.override(language):
        for said, table in ((words.from_now, INSTANTS), (words.duration, DURATIONS)):
            assert {seconds: said(seconds) for seconds in table} == {
                seconds: texts[place] for seconds, texts in table.items()
            }
    with translation.override("de"):
        assert words.count(1234) == "1.234"
    assert words.count(1234) == "1,234"


def test_one_of_a_unit_is_not_said_as_many() -> None:
    said = [words.duration(seconds) for seconds in range(0, 3 * words.DAY, 7)]
    assert [one for one in said if re.search(r"\b1 \w+s\b", one)] == []
