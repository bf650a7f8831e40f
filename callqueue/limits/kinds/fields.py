"""The fields of limits and rules as settings write them: rates, and names that are not known."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from callqueue.texts import nearest

D = TypeVar("D")
SECOND = 1_000_000
PERIODS = {
    "s": SECOND,
    "m": 60 * SECOND,
    "h": 3600 * SECOND,
    "d": 86400 * SECOND,
    "w": 7 * 86400 * SECOND,
}
DAY = PERIODS["d"]
_RATE = re.compile(r"([0-9]{1,12})/([0-9]{0,6})([smhdw])")


def parse_rate(rate: object, where: str) -> tuple[int, int]:
    """``"5/2s"`` -> ``(5, 2_000_000)``: so many per so many microseconds. ImproperlyConfigured
    names `where`.
    """
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if not match:
        raise ImproperlyConfigured(
            f'{where}: {rate!r} is not a rate; write "<n>/<period>", as in "10/s", "5/2s", "100/h"'
        )
    n, count, unit = int(match[1]), int(match[2] or 1), match[3]
    if n < 1 or count < 1:
        raise ImproperlyConfigured(
            f"{where}: {rate!r}: both numbers must be at least 1 (to stop a rule, pause it)"
        )
    if count * PERIODS[unit] > 366 * DAY:
        raise ImproperlyConfigured(f"{where}: {rate!r}: the period is longer than a year")
    return n, count * PERIODS[unit]


def check_count(limit: object, name: str) -> None:
    """ImproperlyConfigured where the field is no whole number, or less than 1."""
    value = getattr(limit, name)
    if type(value) is not int or value < 1:
        where = f"{type(limit).__name__}.{name}"
        raise ImproperlyConfigured(f"{where}: {value!r} is not a whole number of at least 1")


def with_known_fields(declared: type[D]) -> type[D]:
    """A dataclass whose constructor refuses a field that it does not have as settings are refused:
    with the nearest it has.
    """
    construct, known = declared.__init__, [f.name for f in fields(declared) if f.init]  # type: ignore[arg-type]

    @wraps(construct)
    def construct_known(self: D, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                near = nearest(name, known)
                advice = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
                raise ImproperlyConfigured(
                    f"{declared.__name__}: there is no field {name!r}; {advice}"
                )
        construct(self, *values, **named)

    declared.__init__ = construct_known  # type: ignore[assignment]
    return declared
