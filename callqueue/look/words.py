"""Durations, instants and counts in words, in the reader's language and time zone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache

from arrow.locales import Locale, TimeFrameLiteral, get_locale
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import get_language
from django.utils.translation import gettext as _

MINUTE, HOUR, DAY = 60, 3600, 86400
LONGEST = 36500 * DAY
JUST_NOW = 10  # what is over for fewer seconds was just now


def duration(seconds: float) -> str:
    """ "850 ms", "12 seconds", "4 minutes", "3 hours and 20 minutes", "2 days and 4 hours"."""
    if 0.001 <= seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds > LONGEST:
        return _("more than a hundred years")
    locale = _locale(get_language() or "en")
    parts = [locale.describe(unit, number, only_distance=True) for unit, number in _units(seconds)]
    return f" {locale.and_word} ".join(parts)


def from_now(seconds: float) -> str:
    """ "in 3 hours and 12 minutes", "just now"; of negative seconds "2 minutes ago"."""
    if seconds > LONGEST:
        return _("in more than a hundred years")
    if seconds < -LONGEST:
        return _("more than a hundred years ago")
    locale = _locale(get_language() or "en")
    if -JUST_NOW < seconds <= 0:
        return locale.describe("now")
    sign = -1 if seconds < 0 else 1
    parts = [(unit, sign * number) for unit, number in _units(abs(seconds))]
    return locale.describe_multi(parts) if len(parts) > 1 else locale.describe(*parts[0])


def ago(at: datetime, now: datetime) -> str:
    """ "2 minutes ago", "just now"; what is later than now is just now."""
    return from_now(-max(0.0, (now - at).total_seconds()))


def instant(at: datetime) -> str:
    """ "2026-11-22 17:04:05 UTC": in the current time zone, which is named."""
    here = timezone.localtime(at) if timezone.is_aware(at) else at
    return f"{here:%Y-%m-%d %H:%M:%S} {here:%Z}".rstrip()


def count(number: float) -> str:
    """ "1,234" in English, "1.234" in German."""
    if 0 <= number < 1000 and number == int(number):
        return str(int(number))  # as it is in every language, and quicker
    return str(number_format(number, decimal_pos=0, force_grouping=True))


def _units(seconds: float) -> list[tuple[TimeFrameLiteral, int]]:
    """As exactly as one who waits wants it: in one unit, or two where the first says little."""
    whole = round(seconds)
    if whole < 2 * MINUTE:
        return [("second" if whole == 1 else "seconds", whole)]
    if whole < 2 * HOUR:
        return [("minutes", round(whole / MINUTE))]
    if whole < 2 * DAY:
        hours, minutes = divmod(round(whole / MINUTE), 60)
        return [("hours", hours), *_unit_unless_zero("minute", "minutes", minutes)]
    days, hours = divmod(whole // HOUR, 24)
    return [("days", days), *_unit_unless_zero("hour", "hours", hours if days < 10 else 0)]


def _unit_unless_zero(
    one: TimeFrameLiteral, many: TimeFrameLiteral, number: int
) -> list[tuple[TimeFrameLiteral, int]]:
    return [(one if number == 1 else many, number)] if number else []


@lru_cache
def _locale(language: str) -> Locale:
    for name in (language, language.partition("-")[0]):
        try:
            return get_locale(name)
        except ValueError:
            continue
    return get_locale("en")


def short_duration(seconds: float) -> str:
    """A duration where there is little room: "850 ms", "1.5 s", "12 s", "4 min", "3 h", "2 d"."""
    if seconds < 1:
        return f"{round(1000 * seconds)} ms"
    if seconds < 10:
        return f"{number_format(round(seconds, 1), decimal_pos=1)} s"
    for unit, length in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 120 * length and not (unit == "h" and seconds >= 48 * 3600):
            return f"{round(seconds / length)} {unit}"
    return f"{round(seconds / 86400)} d"


def clock_time(at: datetime, now: datetime) -> str:
    """A clock time with its zone, to the second if past; with its date if that is not today's."""
    local, today = timezone.localtime(at), timezone.localtime(now)
    shown = f"{local:%H:%M:%S}" if at <= now else f"{local:%H:%M}"
    if local.date() != today.date():
        return f"{local:%Y-%m-%d} {shown} {local:%Z}"
    return f"{shown} {local:%Z}"


def clock_time_in(now: datetime, seconds: float) -> str:
    """The clock time after so many seconds; if that is over LONGEST, "in more than ..."."""
    if seconds > LONGEST:
        return from_now(seconds)
    return clock_time(now + timedelta(seconds=max(1.0, seconds)), now)


def rate(number: float) -> str:
    """A rate a second: "7.9", "1,234"."""
    if number >= 100 or number == int(number):
        return count(number)
    digits = 1 if number >= 0.1 else 2
    return str(number_format(round(number, digits), decimal_pos=digits))


def join_names(listed: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """ "a, b, c, …": the first `most`, and whether there are others."""
    return between.join([*listed[:most], *(["…"] if len(listed) > most else [])])
