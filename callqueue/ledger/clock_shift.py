"""Moves what the ledger still counts along with a clock that jumped.

In: the jump, with all rules' rows locked. Out: the count of attempts that were moved. Nothing is
ever moved to before its own time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import Case, DateTimeField, F, Q, QuerySet, Value, When
from django.db.models.functions import Coalesce

from callqueue import database, states, tables
from callqueue.database import from_us
from callqueue.ledger import agreement, key_turns
from callqueue.ledger.retention import longest_window

# in a rule's memo: what the clock showed before it jumped, so that what was due then still is
WAS = "was"


@dataclass(frozen=True)
class Jump:
    """What the clock shows now, and by how much it jumped: perhaps less, by `doubt`, and within the
    last `gap`. Microseconds.
    """

    now: int
    by: int
    doubt: int
    gap: int


def shift(using: str, jump: Jump, rules: Iterable[Any]) -> int:
    """Move what the ledger still counts by the jump; the count of attempts. To be called with all
    rules' rows locked.

    Nothing is moved to before its own time in the new frame, whichever frame it was written in:
    forward, an instant is moved by as much as the clock, though not past its "now"; back, only what
    lies in the future is moved, and not past "now" either. So it may be moved twice, or by somebody
    who does not know all: then it counts for longer, up to a window from "now".
    """
    forget(using, rules, jump)
    _shift_holds(using, jump)
    _shift_retries(using, jump)
    _shift_counted(using, jump)
    # Those that are under way first: one that is answered meanwhile is then among the answered.
    return _shift_open(using, jump) + _shift_answered(using, jump)


def forget(using: str, rules: Iterable[Any], jump: Jump) -> None:
    """Forget memos and tallies: all is counted anew. What was due before still is."""
    for rule in rules:
        was = max(rule.memo.get(WAS, 0), jump.now - jump.by)
        tables.rule_states(using).filter(pk=rule.pk).update(memo={WAS: was})
    key_turns.set_back(using, jump.now)
    if jump.by > 0:  # back, what a rule was charged with counts for longer rather than for less
        agreement.shift(using, jump.by)


def _shift_open(using: str, jump: Jump) -> int:
    """Attempts under way. What their own clock said when they were released, or begun, tells the
    frame they were written in.
    """
    by, begun = timedelta(microseconds=jump.by), Coalesce("started_at", "released_at")
    rows = tables.attempts(using).open()
    of_old = _of_old_frame(rows.annotate(begun=begun), "begun", jump)
    count = of_old.update(lease_until=F("lease_until") + by, started_at=F("started_at") + by)
    # No later than it was: what is remembered of a bucket ends before the first attempt that is
    # still open was released.
    released = {
        "released_at": F("released_at") + by - timedelta(microseconds=jump.doubt),
        "send_at": F("send_at") + by,
    }
    _of_old_frame(rows, "released_at", jump).update(**released)
    # All of them: one that is being told of now is waited for.
    rows.update(sent_at=_moved("sent_at", jump))
    return int(count)


def _shift_answered(using: str, jump: Jump) -> int:
    """Attempts that some limit may still count. Whoever writes when one ended, or was sent, has a
    reading that is `held`: it is past by now.
    """
    oldest = (
        jump.now - jump.by - longest_window(agreement.book_in_force(using))
        if jump.by > 0
        else jump.now
    )
    rows = tables.attempts(using).filter(finished_at__gt=from_us(oldest))
    names = ("released_at", "started_at", "sent_at", "finished_at")
    return int(rows.update(**{name: _moved(name, jump) for name in names}))


def _moved(name: str, jump: Jump) -> Case:
    """The instant, moved by the jump but not past now: what is past stays so, what is in the future
    does not come before now.
    """
    now, by = from_us(jump.now), timedelta(microseconds=jump.by)
    if jump.by > 0:
        cases = [
            When(**{f"{name}__lte": now - by}, then=F(name) + by),
            When(**{f"{name}__lte": now}, then=Value(now)),
        ]
    else:
        cases = [
            When(**{f"{name}__gte": now - by}, then=F(name) + by),
            When(**{f"{name}__gt": now}, then=Value(now)),
        ]
    return Case(*cases, default=F(name), output_field=DateTimeField())


def _shift_holds(using: str, jump: Jump) -> None:
    """Holds that end by themselves, those that were laid before the jump; none is made shorter."""
    by = timedelta(microseconds=jump.by)
    rows = tables.holds(using).filter(until__isnull=False)
    _of_old_frame(rows, "began_at", jump).update(until=F("until") + by, began_at=F("began_at") + by)


def _shift_retries(using: str, jump: Jump) -> None:
    """Calls that wait for their backoff go on waiting as long as they had to, or less. Scheduled
    ones keep their instants.
    """
    retries = tables.calls(using).filter(status=states.ERROR, ready=False)
    of_old = (
        Q(due_at_dt__lt=from_us(jump.now - jump.gap))
        if jump.by > 0
        else Q(due_at_dt__gt=from_us(jump.now - jump.by - jump.gap))
    )
    retries.filter(of_old).update(due_at_dt=F("due_at_dt") + timedelta(microseconds=jump.by))


def _shift_counted(using: str, jump: Jump) -> None:
    """How far history is counted, as the attempts that were counted are moved. After a clock that
    was set back, what was not counted yet and lay in the future is left out.
    """
    for row in database.locked(tables.counted(using).filter(until__gt=0), wait=True):
        row.frame += 1
        for name in ("until", "peaks_until"):
            instant = getattr(row, name)
            if jump.by > 0:
                instant = min(instant + jump.by, jump.now)
            elif instant > jump.now:
                instant = max(instant + jump.by, jump.now + 1)
            setattr(row, name, instant)
        row.save(using=using)


def _of_old_frame(rows: QuerySet[Any], name: str, jump: Jump) -> QuerySet[Any]:
    """Those whose instant, which was read off the clock at that moment, was surely read before the
    jump, or just after it.
    """
    if jump.by > 0:
        return rows.filter(**{f"{name}__lte": from_us(jump.now - jump.by + jump.doubt)})
    return rows.filter(**{f"{name}__gt": from_us(jump.now)})
