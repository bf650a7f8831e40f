"""What an attempt's end means: four outcomes, as plain values, of handlers and `classify`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True)
class Succeeded:
    """The call is done. `result` is what a handler returned (JSON), kept with the attempt."""

    result: object = None


@dataclass(frozen=True)
class RetryLater:
    """A failed attempt; the call goes again `after` seconds, or after the rule's backoff."""

    why: str
    after: float | timedelta | None = None


@dataclass(frozen=True)
class HoldUntil:
    """The provider throttles: nothing in `scope` goes before `until`.

    `until`: seconds from now, an aware datetime, or None (as what is past) for the rule's backoff.
    `scope`: "key", "queue", "rule", the name of one of the call's keys, or None for the narrowest
    that one of the rule's limits is per and the call has.
    """

    until: float | timedelta | datetime | None
    why: str
    scope: str | None = None


@dataclass(frozen=True)
class GiveUp:
    """The call has failed for good; no retry can help."""

    why: str


Outcome = Succeeded | RetryLater | HoldUntil | GiveUp
OUTCOMES = (Succeeded, RetryLater, HoldUntil, GiveUp)
