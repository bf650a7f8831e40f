"""Values of headers as strangers write them: numbers, counts, waits, dates, members of a list.

Text enters; a value leaves, or None for what cannot be read. Never raises, and never takes long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_CLOCKS_APART = 86400.0  # seconds beyond which an answer's Date tells nothing of its clock
_EPOCH_FROM, _EPOCH_TOO_FINE_FROM = 1e9, 1e12
_LONGEST_DATE = 100
_LONGEST_FIELD = 2000

_NUMBER = re.compile(r"\+?([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,4})?)")
_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,12})?(?:ms|[dhms]))+")
_DURATION_PART = re.compile(r"([0-9.]+)(ms|[dhms])")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# "Fri, 20 Nov 2026 12:00:00 GMT" has a comma of its own
_LISTED = re.compile(r"[A-Za-z]{3,9},[^,]*|[^,]+")
_JAVASCRIPT_ZONE = re.compile(r"GMT(?=[+-][0-9]{4})|\(.*")
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_MEMBERS = re.compile(rf'(?:{_QUOTED}|[^",])+')
_PARAMETERS = re.compile(rf'(?:{_QUOTED}|[^";])+')


def plain_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers by lowercase name, cut to a sane length; one list of those that repeat."""
    plain: dict[str, str] = {}
    for name, value in (headers or {}).items():
        key, text = _decoded(name).strip().lower(), _decoded(value).strip()[:_LONGEST_FIELD]
        if text:
            plain[key] = f"{plain[key]}, {text}" if key in plain else text
    return plain


def members_of(value: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The members of a structured list (RFC 9651) with their parameters, read leniently."""
    for member in _MEMBERS.findall(value):
        name, *parameters = _PARAMETERS.findall(member) or [""]
        split = (parameter.strip().partition("=") for parameter in parameters)
        yield name.strip(), {key.strip().lower(): found.strip() for key, _, found in split}


def count_of(value: str) -> int | None:
    """Whole units, rounded down. A negative count, as Azure sends for "unknown", says nothing."""
    number = number_of(value)
    return None if number is None else int(min(number, 1e15))


def number_of(value: str) -> float | None:
    """A number that is not negative, infinite where a float cannot hold it; else None."""
    match = _NUMBER.fullmatch(value.strip(" \t"))
    return float(match[1]) if match else None


def waits_of(value: str, reference: datetime, *, epochs: bool) -> list[float | None]:
    """Each of the values as seconds from now, None for what cannot be read."""
    return [_wait(part, reference, epochs=epochs) for part in _LISTED.findall(value)]


def _wait(value: str, reference: datetime, *, epochs: bool) -> float | None:
    text = value.strip(' \t"')
    number = number_of(text)
    if number is not None:
        return _since_epoch(number, reference) if epochs and number >= _EPOCH_FROM else number
    if len(text) > _LONGEST_DATE:
        return None
    if _DURATION.fullmatch(text):
        return sum(float(amount) * _SECONDS[unit] for amount, unit in _DURATION_PART.findall(text))
    date = _date(text)
    return None if date is None else (date - reference).total_seconds()


def _since_epoch(number: float, reference: datetime) -> float:
    """Seconds from `reference` to an epoch in seconds, milli-, micro- or nanoseconds."""
    for _ in range(3):
        number = number / 1000 if number >= _EPOCH_TOO_FINE_FROM else number
    return number - reference.timestamp()


def clock_of(plain: Mapping[str, str], now: datetime) -> datetime:
    """The provider's clock: the answer's Date, unless it is more than a day from ours."""
    date = _date(plain.get("date", "")[:_LONGEST_DATE])
    return date if date is not None and abs((date - now).total_seconds()) <= _CLOCKS_APART else now


def _date(text: str) -> datetime | None:
    """An HTTP date in any of its forms, JavaScript's form, or ISO 8601; UTC without a zone."""
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return aware(parse(_JAVASCRIPT_ZONE.sub("", text).strip()))
        except Exception:  # many kinds: these parsers were not written for what strangers send
            continue
    return None


def aware(moment: datetime) -> datetime:
    return moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)


def _decoded(text: object) -> str:
    return text.decode("latin-1") if isinstance(text, bytes) else str(text)
