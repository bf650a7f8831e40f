"""Durations as operators type them: `<n>` with s, m, h, d or w."""

from __future__ import annotations

import re
from datetime import timedelta

from django.utils.translation import gettext as _

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LONGEST = timedelta(days=3660)
_DURATION = re.compile(r"([0-9]{1,12})([smhdw])")


class WrongDuration(ValueError):
    """The text is not a duration; the message says how one is written."""


def parse_duration(text: str) -> timedelta:
    """``"90s"``, ``"2h"``, ``"7d"`` as a timedelta; WrongDuration where it is none, or too long."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise WrongDuration(
            _('%r is not a duration; write "<n>" with s, m, h, d or w, as in "90s", "2h", "7d"')
            % text
        )
    seconds = int(match[1]) * SECONDS[match[2]]
    if seconds > LONGEST.total_seconds():
        raise WrongDuration(_("%r is longer than ten years") % text)
    return timedelta(seconds=seconds)
