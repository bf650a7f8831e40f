"""Requeue and cancel by the thousand, in short batches: each is a transaction, fenced by states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from django.db.models import Exists, OuterRef, Q

from callqueue import conf, database, states, tables, texts, transitions
from callqueue.database import from_us
from callqueue.ledger import ledger_time
from callqueue.ledger.transaction import untimed_transaction
from callqueue.sending import validation
from callqueue.states import Move

BATCH = 500
_persist = partial(database.persist, during="bulk")
Progress = Callable[[int, int | None], None]  # (calls looked at, of how many)
# is told the calls that a batch changed, and the status of each before, in its transaction
Log = Callable[[Sequence[Any], Mapping[int, int]], None]
BY_CREATION = (states.NEW, states.DISPATCHED)  # judged by `created_dt`, as they have no end


class Batch(NamedTuple):
    last: int  # the number of the last call that it looked at
    seen: int  # how many it looked at
    changed: int


@dataclass(frozen=True)
class Pick:
    """Which calls: of these statuses, and where given of this rule and key."""

    statuses: tuple[int, ...]
    rule: str | None = None
    key: Any = ""
    # counts from the end; of an ERROR from its last failure, else from `created_dt`
    since: timedelta | None = None


def move_in_batches(calls: Any, move: Move, log: Log | None = None) -> Iterator[Batch]:
    """Make a move with those of these calls that may, by number; a batch for each one asked for."""
    last = 0
    using = calls.db
    while done := _persist(
        using, partial(untimed_transaction, using, partial(_move_batch, calls, move, last, log))
    ):
        last = done.last
        yield done


def _move_batch(calls: Any, move: Move, after: int, log: Log | None) -> Batch | None:
    using = calls.db
    able = calls.filter(status__in=move.sources, pk__gt=after).order_by("pk")
    before = dict(able.values_list("pk", "status")[:BATCH])
    if not before:
        return None  # no call is left that may be moved
    pks = list(before)
    is_cancel = move is Move.CANCEL
    count = transitions.cancel(using, pks) if is_cancel else transitions.requeue(using, pks, move)
    if log and count:
        moved = tables.calls(using).filter(pk__in=pks, status__in=move.targets)
        log(list(moved.defer("call_data")), before)
    return Batch(pks[-1], len(pks), count)


def requeue(
    using: str, pick: Pick, *, again: bool = False, progress: Progress | None = None
) -> int:
    """Send once more the picked calls that may be; how many. DONE ones only with `again`."""
    return _move_picked(using, pick, Move.REQUEUE_AGAIN if again else Move.REQUEUE, progress)


def cancel(using: str, pick: Pick, *, progress: Progress | None = None) -> int:
    """End the picked calls that no worker has begun; how many."""
    return _move_picked(using, pick, Move.CANCEL, progress)


def count(using: str, pick: Pick) -> int:
    return _persist(using, lambda: int(picked_calls(using, pick).count()))


def parse_statuses(
    names: Sequence[str] | None, default: Sequence[int], legal: Sequence[int]
) -> tuple[int, ...]:
    """The statuses of these names. ValueError where one is unknown, or not `legal`."""
    if not names:
        return tuple(default)
    allowed = {conf.NAMES_OF_STATUS[status]: status for status in legal}
    for name in names:
        if name not in conf.STATUS_NAMES:
            raise ValueError(f"there is no status {name!r}{texts.suggest(name, allowed)}")
        if name not in allowed:
            raise ValueError(f"{name!r} is not possible here; choose from {', '.join(allowed)}")
    return tuple(dict.fromkeys(allowed[name] for name in names))


def picked_calls(using: str, pick: Pick) -> Any:
    rows = tables.calls(using).filter(status__in=pick.statuses)
    rows = rows.exclude(method=states.PERMIT, status__in=states.FINAL)  # nobody makes it again
    if pick.rule is not None:
        conf.current().rule(pick.rule)
        rows = rows.filter(rule=pick.rule)
    if text := validation.check_key(pick.key):
        rows = rows.filter(key=text)
    if pick.since is not None:
        rows = rows.filter(_condition_of_ended(using, pick.since))
    return rows


def _move_picked(using: str, pick: Pick, move: Move, progress: Progress | None) -> int:
    rows = _persist(using, lambda: picked_calls(using, pick))
    total = _persist(using, lambda: int(rows.count())) if progress else None
    changed = seen = 0
    for done in move_in_batches(rows, move):
        seen, changed = seen + done.seen, changed + done.changed
        if progress:
            progress(seen, total)
    return changed


def _condition_of_ended(using: str, within: timedelta) -> Q:
    """That a call ended (ERROR: last failed; BY_CREATION: was created) no longer ago than that."""
    reading = ledger_time.read(using)
    cut, since = from_us(reading.wall) - within, from_us(reading.at) - within
    of_call = tables.attempts(using).charged().filter(call_id=OuterRef("pk"))
    attempts = of_call.filter(finished_at__gte=since)
    ended = Q(status__in=states.FINAL, finished_at_dt__gte=cut)
    failed = Q(status=states.ERROR) & Q(Exists(attempts))
    return ended | failed | Q(status__in=BY_CREATION, created_dt__gte=cut)
