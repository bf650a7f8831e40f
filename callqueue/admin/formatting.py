"""Durations and counts in words, as short as a table wants them, in the reader's language."""

from __future__ import annotations

from django.utils.formats import number_format
from django.utils.translation import gettext as _


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
        return _("more than a hundred years")
    return (
        _("%(days)s d %(hours)d h") % {"days": days, "hours": hours}
        if hours and days < 100
        else _("%s d") % count(days)
    )


def count(number: float) -> str:
    """ "1,234" in English, "1.234" in German."""
    return str(number_format(number, decimal_pos=0, force_grouping=True))
