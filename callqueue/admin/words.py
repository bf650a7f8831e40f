"""Durations in words, as short as a table wants them. Pure."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """ "850 ms", "12 s", "4 min", "3 h 20 min", "2 d 4 h"."""
    if seconds < 1:
        return f"{round(seconds * 1000)} ms" if seconds >= 0.001 else "0 s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{round(whole / 60)} min"
    if whole < 172800:
        hours, rest = divmod(round(whole / 60), 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(round(whole / 3600), 24)
    if days > 36500:
        return "more than a hundred years"
    return f"{days:,} d {hours} h" if hours and days < 100 else f"{days:,} d"
