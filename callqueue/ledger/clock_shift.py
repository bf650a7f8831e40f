"""Moves what the ledger still counts along with a clock that jumped.

In: the jump, with all rules' rows locked. Out: the count of attempts that were moved. Nothing is
ever moved to before its own time.

After a jump forward, the answered attempts of each rule are moved later, some at a time, however
many there are: it is written down which (MOVING), and until all are moved, nothing is released that
they count for. Other rules go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from django.db.models import Case, DateTimeField, F, Q, QuerySet, Value, When
from django.db.models.functions import Coalesce

from callqueue import database, states, tables
from callqueue.database import from_us, to_us
from callqueue.ledger import key_turns, settings
from callqueue.ledger.rule_rows import MOVING
from callqueue.ledger.tallies import counted_for, longest_window
from callqueue.limits.kinds import SECOND

# in a rule's memo: what the clock showed before it jumped, so that what was due then still is
WAS = "was"
AT_ONCE = 1000  # answered attempts that one transaction moves


@dataclass(frozen=True)
class Jump:
    """What the clock shows now, and by how much it jumped: perhaps less, by `doubt`, and within the
    last `gap`. Microseconds.
    """

    now: int
    by: int
    doubt: int
    gap: int


@dataclass(frozen=True)
class _Move:
    """Attempts of a rule that are still to be moved: those that ended after `since`, and by `until`
    at the latest. `by` and `now`: of the jump. Microseconds.
    """

    since: int
    until: int
    by: int
    now: int


def shift(using: str, jump: Jump, rules: Collection[Any]) -> int:
    """Move what the ledger still counts by the jump; the count of attempts. To be called with all
    rules' rows locked. After a jump forward, `move_on` has to move what was answered.

    Nothing is moved to before its own time in the new frame, whichever frame it was written in:
    forward, an instant is moved by as much as the clock, though not past its "now"; back, only what
    lies in the future is moved, and not past "now" either. So it may be moved twice, or by somebody
    who does not know all: then it counts for longer, up to a window from "now".
    """
    forget(using, rules, jump)
    _shift_holds(using, jump)
    _shift_retries(using, jump)
    _shift_summed(using, jump)
    _shift_signs(using, jump)
    # Those that are under way first: one that is answered meanwhile is then among the answered.
    count = _shift_open(using, jump)
    if jump.by > 0:
        _note_answered(using, jump, [rule.pk for rule in rules])
        return count
    return count + _shift_answered(using, jump)


def forget(using: str, rules: Iterable[Any], jump: Jump) -> None:
    """Forget memos and tallies: all is counted anew, and keys that wait are woken. What was due
    before still is.
    """
    was = jump.now - jump.by
    memos = [{"pk": rule.pk, "memo": {WAS: max(rule.memo.get(WAS, 0), was)}} for rule in rules]
    database.update_each(tables.RuleState, using, memos)
    if jump.by > 0:  # back, what a rule was charged with counts for longer rather than for less
        settings.shift(using, jump.by)
    else:
        key_turns.set_back(using, jump.now)


def lag(using: str) -> int:
    """By how much the attempts at most lag behind that are still to be moved; 0: there are none."""
    found = tables.rule_states(using).filter(rule=MOVING).values_list("memo", flat=True).first()
    return max((sum(move["by"] for move in moves) for moves in (found or {}).values()), default=0)


def move_on(using: str, rules: Collection[str] | None = None) -> bool:
    """Move AT_ONCE answered attempts more, of these rules or of all; whether none is left of them.
    In a transaction. Where somebody else does so, it is left to him.

    The newest first: what was moved is then later than all that still is to be.
    """
    row = database.locked(tables.rule_states(using).filter(rule=MOVING)).first()
    if row is None:
        return False
    moves: dict[str, list[dict[str, int]]] = dict(row.memo)
    wanted, left = sorted(moves if rules is None else moves.keys() & set(rules)), AT_ONCE
    for rule in wanted:
        while moves[rule] and left:
            count, rest = _move_some(using, rule, _Move(**moves[rule][0]), left)
            moves[rule] = [*([] if rest is None else [asdict(rest)]), *moves[rule][1:]]
            left -= count
        if not moves[rule]:
            del moves[rule]
    tables.rule_states(using).filter(rule=MOVING).update(memo=moves)
    return moves.keys().isdisjoint(wanted)


def _move_some(using: str, rule: str, move: _Move, most: int) -> tuple[int, _Move | None]:
    """Move the newest of them, at most so many; how many those were, and what is left, if
    anything.
    """
    begin, end = from_us(move.since), from_us(move.until)
    rows = tables.attempts(using).filter(rule=rule, finished_at__gt=begin, finished_at__lte=end)
    newest = rows.order_by("-finished_at").values_list("pk", "finished_at")
    found: list[tuple[int, Any]] = list(newest[:most])
    _move_rows(
        tables.attempts(using).filter(pk__in=[pk for pk, _ in found]),
        Jump(move.now, move.by, 0, 0),
    )
    # Others may have ended at the same instant as the last of these. Those are past it by now.
    is_left = len(found) == most
    return len(found), replace(move, until=to_us(found[-1][1])) if is_left else None


def _note_answered(using: str, jump: Jump, rules: Iterable[str]) -> None:
    """Write down that what some limit may still count is to be moved: of each rule as far back as
    its own limits count. Whoever writes when an attempt ended, or was sent, has a reading that is
    `held`: it is past by now.
    """
    book = settings.book_in_force(using)
    windows, longest = counted_for(book), longest_window(book)
    row = tables.rule_states(using).get(rule=MOVING)
    for rule in rules:
        since = jump.now - jump.by - windows.get(rule, longest)
        move = _Move(since, jump.now - 1, jump.by, jump.now)
        row.memo.setdefault(rule, []).append(asdict(move))
    row.save(using=using)


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
    """After a jump back: what is in the future now. And what is still to be moved by a jump forward
    is moved no further than to now.
    """
    row = tables.rule_states(using).get(rule=MOVING)
    for moves in row.memo.values():
        for move in moves:
            move["now"] = min(move["now"], jump.now)
            move["until"] = min(move["until"], jump.now - 1)
    row.save(using=using)
    return _move_rows(tables.attempts(using).filter(finished_at__gt=from_us(jump.now)), jump)


def _move_rows(rows: QuerySet[Any], jump: Jump) -> int:
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


def _shift_signs(using: str, jump: Jump) -> None:
    """Dispensers are as silent as they were: or what only one of them holds would not be in force
    for whoever has not heard it yet.
    """
    if jump.by > 0:
        tables.dispensers(using).update(seen_at=_moved("seen_at", jump))


def _shift_summed(using: str, jump: Jump) -> None:
    """How far sums are added up, as the attempts that were are moved. Nothing up to now is counted
    once more to settle it: what was moved there is in the sums of where it was. So what a clock
    that was set back found not added yet, of its last seconds, never is.
    """
    for row in database.locked(tables.summed(using).filter(until__gt=0), wait=True):
        if jump.by > 0:
            row.until = min(row.until + jump.by, jump.now)
        elif row.until > jump.now:
            row.until = max(row.until + jump.by, jump.now + 1)
        row.settled = max(row.settled, jump.now // SECOND + 1)
        row.save(using=using)


def _of_old_frame(rows: QuerySet[Any], name: str, jump: Jump) -> QuerySet[Any]:
    """Those whose instant, which was read off the clock at that moment, was surely read before the
    jump, or just after it.
    """
    if jump.by > 0:
        return rows.filter(**{f"{name}__lte": from_us(jump.now - jump.by + jump.doubt)})
    return rows.filter(**{f"{name}__gt": from_us(jump.now)})
