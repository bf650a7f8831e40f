"""What an attempt's end means: four outcomes, as plain values, of handlers and `classify`. Pure.
A `why` may be anything that has words, such as the error that was caught: it is kept as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from callqueue import texts


@dataclass(frozen=True)
class Succeeded:
    """The call is done. `result` is what a handler returned (JSON), kept with the attempt."""

    result: object = None


@dataclass(frozen=True)
class RetryLater:
    """A failed attempt. Unless it was the last: again in `after` seconds (None: rule's backoff)."""

    why: str
    after: float | timedelta | None = None

    def __post_init__(self) -> None:
        _keep_why_as_text(self)
        if not isinstance(self.after, int | float | timedelta | None):
            raise _type_error(self, "after", "seconds, a timedelta or None")


@dataclass(frozen=True)
class HoldUntil:
    """The provider throttles: nothing in `scope` goes before `until`, at most `max_hold` from now.

    `until`: seconds from now, an aware datetime, or None (as what is past) for the rule's backoff.
    `scope`: "key", "queue", "rule", the name of one of the call's keys, or None: the first key that
    the rule's limits are per and the call has, else "queue" if one is. In other cases: the rule.
    """

    until: float | timedelta | datetime | None
    why: str
    scope: str | None = None

    def __post_init__(self) -> None:
        _keep_why_as_text(self)
        if not isinstance(self.until, int | float | timedelta | datetime | None):
            raise _type_error(self, "until", "seconds, a timedelta, a datetime or None")


@dataclass(frozen=True)
class GiveUp:
    """The call has failed for good; no retry can help."""

    why: str

    def __post_init__(self) -> None:
        _keep_why_as_text(self)


def _keep_why_as_text(outcome: RetryLater | HoldUntil | GiveUp) -> None:
    object.__setattr__(outcome, "why", texts.worded_reason(outcome.why))


def _type_error(outcome: object, name: str, wanted: str) -> TypeError:
    kind = type(getattr(outcome, name)).__name__
    return TypeError(f"{type(outcome).__name__}.{name}: must be {wanted}, not {kind}")


Outcome = Succeeded | RetryLater | HoldUntil | GiveUp
OUTCOMES = (Succeeded, RetryLater, HoldUntil, GiveUp)
