"""Requeue and cancel by the thousand: picks calls by status, rule, key and time, and acts in short
batches.

In: a Pick, a function that is told how far the work is. Out: the count of calls that changed. Each
batch is fenced by the states it starts from, so workers and dispensers may go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db.models import Exists, OuterRef, Q

from callqueue import conf, database, states, tables, texts
from callqueue.database.batches import in_batches
from callqueue.operations.spread import spread_of as spread_of
from callqueue.sending import validation

BATCH = 500
Progress = Callable[[int, int | None], None]
BY_CREATION = (states.NEW, states.DISPATCHED)


@dataclass(frozen=True)
class Pick:
    """Which calls: of these statuses, and where given of this rule, this key, and ended no longer
    ago than `since`.

    `since` counts from `finished_at_dt`; for an ERROR from its last failure, for NEW and DISPATCHED
    from `created_dt`.
    """

    statuses: tuple[int, ...]
    rule: str | None = None
    key: Any = ""
    since: timedelta | None = None


def count(using: str, pick: Pick) -> int:
    """How many calls are picked now."""
    return database.persist(using, lambda: int(picked(using, pick).count()), during="bulk")


def requeue(
    using: str,
    pick: Pick,
    *,
    again: bool = False,
    pace: str = "",
    delay: str = "",
    progress: Progress | None = None,
) -> int:
    """Send the picked calls once more, those that may be; the count of them. DONE ones only with
    `again`. `pace` ("10/s"): so many come due in such a time; `delay` ("10m"): none before.
    """
    spread = database.persist(
        using, lambda: spread_of(pace, delay, picked(using, pick)), during="bulk"
    )
    done = 0

    def act(calls: Any) -> int:
        nonlocal done
        if spread is None:
            return int(calls.requeue(again=again))
        with database.writing(using):
            changed = int(calls.requeue(again=again))
            if changed:
                pks = list(calls.values_list("pk", flat=True))
                spread.put_off(using, pks, done)
        done += changed
        return changed

    return _each_batch(using, pick, act, progress)


def cancel(using: str, pick: Pick, *, progress: Progress | None = None) -> int:
    """End the picked calls, those that no worker has begun; the count of them."""
    return _each_batch(using, pick, lambda calls: int(calls.cancel()), progress)


def statuses_of(
    names: Sequence[str] | None, default: Sequence[int], legal: Sequence[int]
) -> tuple[int, ...]:
    """The statuses of these names; ValueError where one is unknown, or not among the `legal`
    ones.
    """
    if not names:
        return tuple(default)
    allowed = {conf.NAMES_OF_STATUS[status]: status for status in legal}
    for name in names:
        if name not in conf.STATUS_NAMES:
            raise ValueError(f"there is no status {name!r}{texts.suggest(name, allowed)}")
        if name not in allowed:
            raise ValueError(f"{name!r} is not possible here; choose from {', '.join(allowed)}")
    return tuple(dict.fromkeys(allowed[name] for name in names))


def _each_batch(
    using: str, pick: Pick, act: Callable[[Any], int], progress: Progress | None
) -> int:
    persist = partial(database.persist, using, during="bulk")
    rows = persist(lambda: picked(using, pick))
    total = persist(lambda: int(rows.count())) if progress else None
    changed = seen = 0
    for pks in in_batches(rows, BATCH, read=persist):
        changed += persist(partial(act, tables.calls(using).filter(pk__in=pks)))
        seen += len(pks)
        if progress:
            progress(seen, total)
    return changed


def picked(using: str, pick: Pick) -> Any:
    """The calls that are picked now."""
    rows = tables.calls(using).filter(status__in=pick.statuses)
    if pick.rule is not None:
        conf.current().rule(pick.rule)
        rows = rows.filter(rule=pick.rule)
    if text := validation.check_key(pick.key):
        rows = rows.filter(key=text)
    if pick.since is not None:
        rows = rows.filter(_since(using, database.clock(using) - pick.since))
    return rows


def _since(using: str, cut: datetime) -> Q:
    """Calls whose end, or whose last failure, is no earlier than `cut`."""
    attempts = tables.attempts(using).charged().filter(call_id=OuterRef("pk"), finished_at__gte=cut)
    ended = Q(status__in=states.FINAL, finished_at_dt__gte=cut)
    failed = Q(status=states.ERROR) & Q(Exists(attempts))
    return ended | failed | Q(status__in=BY_CREATION, created_dt__gte=cut)
