"""The dates that the list of calls offers: those between the first call and the last.

Django's own date hierarchy reads every row for the days there are. This one reads the two ends.
"""

from __future__ import annotations

import calendar
from datetime import date, datetime
from typing import Any

from django.utils import formats, timezone
from django.utils.translation import gettext_lazy as _

from callqueue.admin.base import OwnList
from callqueue.models import CallQueue

CREATED = "created_dt__"


class DatedList(OwnList):
    """A change list of calls that offers dates to choose from."""

    def date_choices(self) -> dict[str, Any]:
        """What the page offers: {"back": {...} | None, "choices": [{"link", "title"}]}."""
        every = CallQueue.objects.using(self.root_queryset.db).values_list("created_dt", flat=True)
        ends = [every.order_by(order).first() for order in ("pk", "-pk")]
        if None in ends:
            return {}
        first, last = sorted(_local(end).date() for end in ends if end is not None)
        year, month, day = (
            _whole(self.params.get(f"{CREATED}{part}")) for part in ("year", "month", "day")
        )
        if year is None:
            return {"choices": self._within(first, last)}
        if not 1 <= year <= 9999 or (month is not None and not 1 <= month <= 12):
            return {}
        if month is None:
            back, choices = self._choice(_("All dates")), self._months(year, first, last)
        elif day is None:
            back = self._choice(str(year), year=year)
            choices = self._days(year, month, first, last)
        else:
            back = self._choice(_month(year, month), year=year, month=month)
            choices = [{"title": _day(year, month, day)}]
        return {"back": back, "choices": choices}

    def _within(self, first: date, last: date) -> list[dict[str, Any]]:
        """Years, or the months of the only year, or the days of the only month."""
        if first.year != last.year:
            return [self._choice(str(y), year=y) for y in range(first.year, last.year + 1)]
        if first.month != last.month:
            return self._months(first.year, first, last)
        return self._days(first.year, first.month, first, last)

    def _months(self, year: int, first: date, last: date) -> list[dict[str, Any]]:
        months = [
            m
            for m in range(1, 13)
            if (first.year, first.month) <= (year, m) <= (last.year, last.month)
        ]
        return [self._choice(_month(year, m), year=year, month=m) for m in months]

    def _days(self, year: int, month: int, first: date, last: date) -> list[dict[str, Any]]:
        days = range(1, calendar.monthrange(year, month)[1] + 1)
        between = [d for d in days if first <= date(year, month, d) <= last]
        return [self._choice(_day(year, month, d), year=year, month=month, day=d) for d in between]

    def _choice(self, title: Any, **chosen: int) -> dict[str, Any]:
        link = self.get_query_string(
            {f"{CREATED}{part}": value for part, value in chosen.items()}, remove=[CREATED]
        )
        return {"link": link, "title": title}


def _month(year: int, month: int) -> str:
    return formats.date_format(date(year, month, 1), "YEAR_MONTH_FORMAT")


def _day(year: int, month: int, day: int) -> str:
    """As the reader's language writes it; a day that there is not, as a number."""
    try:
        return formats.date_format(date(year, month, day), "MONTH_DAY_FORMAT")
    except ValueError:
        return str(day)


def _local(instant: datetime) -> datetime:
    return timezone.localtime(instant) if timezone.is_aware(instant) else instant


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) <= 4 else None
