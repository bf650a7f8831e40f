"""Cleanup: deletes calls past their retention, attempts that no limit counts any more, ended holds,
what dispensers said that are long silent; and vacuums. Short transactions by primary key, so that
calls go on meanwhile. An attempt is kept as long as any limit's window may still count it, whatever
became of its call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db.models import Exists, OuterRef, Q

from callqueue import conf, database, events, states, tables
from callqueue.database import from_us
from callqueue.ledger import ledger_time, settings, tallies
from callqueue.ledger.rule_rows import SILENT
from callqueue.ledger.transaction import untimed_transaction

BATCH = 2000
TURNS = 200  # of keys that one transaction deletes
Progress = Callable[[int, int | None], None]


@dataclass
class Cleaned:
    """What a cleanup deleted (or, as a dry run, would delete)."""

    calls: int = 0
    attempts: int = 0
    holds: int = 0


def clean(
    using: str,
    *,
    older_than: timedelta | None = None,
    batch_size: int = BATCH,
    dry_run: bool = False,
    vacuum: bool = False,
    vacuum_full: bool = False,
    progress: Progress | None = None,
) -> Cleaned:
    """Prune everything past retention (`older_than` replaces RETENTION for every final status),
    then reclaim space. `progress` is told (calls deleted so far, how many there are to delete).
    `vacuum_full` locks the tables against all use while they are rewritten.
    """
    if dry_run:
        return database.persist(
            using, lambda: _count_all_to_go(using, older_than), during="cleanup"
        )
    cleaned = Cleaned()
    database.persist(
        using, lambda: _prune(using, older_than, batch_size, cleaned, progress), during="cleanup"
    )
    if cleaned.calls or cleaned.attempts:
        events.emit("calls_pruned", calls=cleaned.calls, attempts=cleaned.attempts)
    if vacuum or vacuum_full:
        database.vacuum(using, _tables_to_vacuum(), full=vacuum_full)
    return cleaned


def longest_overdue(using: str) -> timedelta:
    """For how long the call longest past its retention has been; zero where none is. By index."""
    late = timedelta(0)
    for status, cut in _cutoffs(using, None):
        ended = _overdue_calls(using, status, cut).order_by("finished_at_dt")
        first = ended.values_list("finished_at_dt", flat=True).first()
        late = max(late, cut - first) if first else late
    return late


def _count_all_to_go(using: str, older_than: timedelta | None) -> Cleaned:
    found = Cleaned(holds=_ended_holds(using).count())
    found.attempts = sum(map(len, _spent_orphans(using, BATCH)))
    spent = tables.attempts(using).filter(_spent_condition(using))
    for status, cut in _cutoffs(using, older_than):
        overdue = _overdue_calls(using, status, cut)
        found.calls += overdue.count()
        found.attempts += spent.filter(call_id__in=overdue.values("pk")).count()
    return found


def _count_overdue_calls(using: str, older_than: timedelta | None) -> int:
    cutoffs = _cutoffs(using, older_than)
    return sum(_overdue_calls(using, status, cut).count() for status, cut in cutoffs)


def _prune(
    using: str,
    older_than: timedelta | None,
    batch_size: int,
    cleaned: Cleaned,
    progress: Progress | None,
) -> None:
    """Settle the clock; delete all that is to go, adding to `cleaned`: a broken run is repeated."""
    total = cleaned.calls + _count_overdue_calls(using, older_than) if progress else None
    ledger_time.watch(using).settle()
    for status, cut in _cutoffs(using, older_than):
        for ids in _keys_in_batches(_overdue_calls(using, status, cut), batch_size):
            _delete_calls(using, ids, status, cut, cleaned)
            if progress:
                progress(cleaned.calls, total)
    for orphans in _spent_orphans(using, batch_size):
        cleaned.attempts += database.delete_each(tables.CallAttempt, using, orphans)
    cleaned.holds += _ended_holds(using).delete()[0]
    settings.forget_lapsed(using, _credited_time(using))
    tables.dispensers(using).filter(
        seen_at__lt=_credited_time(using) - dispensers_remembered_for(using)
    ).delete()
    after = 0
    while gone := untimed_transaction(using, partial(_delete_turns, using, after)):
        after = gone[-1]


def _cutoffs(using: str, older_than: timedelta | None) -> Iterator[tuple[int, datetime]]:
    """Each final status with a retention, and the instant before which its calls are past it."""
    now = database.clock(using)
    for status in states.FINAL:
        keep = conf.current().retention.get(status) if older_than is None else older_than
        if keep is not None:
            yield status, now - keep


def _overdue_calls(using: str, status: int, cut: datetime) -> Any:
    ended = tables.calls(using).filter(status=status, finished_at_dt__lt=cut)
    return ended.filter(callback_pending=False)


def _keys_in_batches(rows: Any, size: int) -> Iterator[list[int]]:
    """Primary keys of calls, each once, `size` at a time, in the order in which the calls ended."""
    # That is the order of an index: no database reads all of them for each batch.
    after = Q()
    while found := list(
        rows.filter(after)
        .order_by("finished_at_dt", "pk")
        .values_list("finished_at_dt", "pk")[:size]
    ):
        yield [pk for _, pk in found]
        last, pk = found[-1]
        after = Q(finished_at_dt__gte=last) & (Q(finished_at_dt__gt=last) | Q(pk__gt=pk))


def _delete_calls(using: str, ids: list[int], status: int, cut: datetime, cleaned: Cleaned) -> None:
    """Delete these calls if still past retention, and their attempts that no limit counts."""
    calls, attempts = untimed_transaction(
        using, lambda: _delete_free_calls(using, ids, status, cut)
    )
    cleaned.calls += calls
    cleaned.attempts += attempts


def _delete_free_calls(using: str, ids: list[int], status: int, cut: datetime) -> tuple[int, int]:
    """Delete those of them that nobody has locked; how many calls, and how many attempts."""
    # By key alone: with the condition in it, a database might read all that it is true of.
    rows = database.locked(tables.calls(using).filter(pk__in=ids))
    seen = rows.values_list("pk", "status", "finished_at_dt", "callback_pending")
    gone = [
        pk
        for pk, now, ended, owed in seen
        if now == status and ended is not None and ended < cut and not owed
    ]
    if not gone:  # all of them locked, or not what they were
        return 0, 0
    spent = tables.attempts(using).filter(_spent_condition(using), call_id__in=gone)
    attempts = list(spent.values_list("pk", flat=True))
    count = database.delete_each(tables.CallAttempt, using, attempts)
    return database.delete_each(tables.CallQueue, using, gone), count


def _spent_orphans(using: str, size: int) -> Iterator[list[int]]:
    """Attempts whose call is gone and that no limit counts any more; of `size` rows at a time."""
    # Asked of a stretch of primary keys, the database looks their calls up one by one. Asked for
    # the next few of all, it would join the tables anew each time.
    calls = tables.calls(using).filter(pk=OuterRef("call_id"))
    spent = tables.attempts(using).filter(_spent_condition(using), ~Exists(calls))
    keys = tables.attempts(using).order_by("pk").values_list("pk", flat=True)
    last, newest = 0, keys.last() or 0
    while last < newest:
        end = next(iter(keys.filter(pk__gt=last)[size - 1 : size]), newest)
        yield list(spent.filter(pk__gt=last, pk__lte=end).order_by().values_list("pk", flat=True))
        last = end


def _ended_holds(using: str) -> Any:
    return tables.holds(using).filter(until__lt=_credited_time(using) - timedelta(days=1))


def _delete_turns(using: str, after: int) -> list[int]:
    """Delete unlocked turns, behind `after`, of keys without ready calls: rules whose keys take no
    turns any more leave them. Returns their pks: no more at once than passes may wait for.
    """
    database.set_idle_timeout(using, SILENT)
    same = {name: OuterRef(name) for name in ("rule", "key", "priority")}
    ready = tables.calls(using).waiting().filter(ready=True, **same)
    turns = tables.KeyTurn.objects.using(using).filter(~Exists(ready), pk__gt=after).order_by("pk")
    spent = list(database.locked(turns).values_list("pk", flat=True)[:TURNS])
    database.delete_each(tables.KeyTurn, using, spent)
    return spent


def dispensers_remembered_for(using: str) -> timedelta:
    """How long a silent dispenser's row is kept: while limits count, and a day at least."""
    longest = tallies.longest_counting_time(settings.book_in_force(using))
    return max(timedelta(days=1), timedelta(microseconds=longest))


def _spent_condition(using: str) -> Q:
    """The condition of attempts that no limit counts any more: of their rule, else of any."""
    now, book = _credited_time(using), settings.book_in_force(using)
    rules_of: dict[int, list[str]] = {}
    for rule, window in tallies.counting_times(book).items():
        rules_of.setdefault(window, []).append(rule)
    longest = timedelta(microseconds=tallies.longest_counting_time(book))
    spent = Q(finished_at__lt=now - longest)
    for window, rules in rules_of.items():
        spent |= Q(rule__in=rules, finished_at__lt=now - timedelta(microseconds=window))
    return spent


def _credited_time(using: str) -> datetime:
    """Ledger time, read now; since the last reading, no more than this process saw time go by."""
    last, reading = ledger_time.watch(using).last, ledger_time.read(using)
    return from_us(reading.at if last is None else last.credit(reading))


def _tables_to_vacuum() -> list[str]:
    return [model._meta.db_table for model in (tables.CallQueue, tables.CallAttempt)]
