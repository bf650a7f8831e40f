"""Writes what a pass releases: calls become DISPATCHED, an open attempt of each stands in the
ledger, and the rules' rows remember what the next pass wants to know.

In: an account and releases. Out: the attempts to publish. Callers hold the lock of the rules' rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from callqueue import conf, database, states, tables
from callqueue.database import from_us
from callqueue.dispatch.planning import Release
from callqueue.ledger import account as ledger
from callqueue.ledger.account import Account
from callqueue.limits.budgets import cost_of


@dataclass(frozen=True)
class Released:
    """An attempt that is charged and may be published.

    `waits`: whatever worker takes it, it is not made at once: its slot is still to open, or workers
    are behind.
    """

    attempt_id: int
    queue: str
    method: str
    rule: str
    waits: bool = False


@dataclass(frozen=True)
class LockedRule:
    """A rule's row, locked: how many passes released, when it was served last, what passes
    remember, and by which agreement they go.

    `is_corrected`: whether some of the rule's attempts cost something else than the tallies know.
    """

    passes: int
    served: int
    memo: dict[str, Any]
    agreement: str
    is_corrected: bool


def charge(account: Account, releases: Sequence[Release]) -> list[Released]:
    """Write the releases: the calls are DISPATCHED, and an open attempt of each stands in the
    ledger. A statement for each queue, and one or two for the attempts.
    """
    if not releases:
        return []
    _mark_dispatched(account, releases)
    ids = _insert_attempts(account, releases)
    lead = account.until - account.now
    behind = {rule for rule, at in account.unbegun_since.items() if account.now - at > lead}
    return [
        Released(
            attempt_id,
            made.queue,
            made.candidate.method,
            made.candidate.rule,
            waits=made.send_at is not None or made.candidate.rule in behind,
        )
        for attempt_id, made in zip(ids, releases, strict=True)
    ]


def _mark_dispatched(account: Account, releases: Sequence[Release]) -> None:
    """A release may be lost in a crash of the database: its call then waits as before, and its
    message finds nothing to begin. What was begun is not lost with it, since begin waits for the
    disk, and for all that was committed before.
    """
    using = account.using
    lazily = database.without_waiting_for_disk(using)
    table = database.quoted(using, tables.CallQueue._meta.db_table)
    now = database.as_parameter(using, from_us(account.now))
    by_queue: dict[str, list[int]] = {}
    for made in releases:
        by_queue.setdefault(made.queue, []).append(made.candidate.id)
    for queue, ids in by_queue.items():
        database.run(
            using,
            f"UPDATE {table} SET status = {states.DISPATCHED}, queue = %s, dispatched_at_dt = %s, "
            f"last_attempt = last_attempt + 1, ready = FALSE "
            f"WHERE id IN ({database.listed(ids)}){lazily}",
            [queue, now],
        )


def _insert_attempts(account: Account, releases: Sequence[Release]) -> list[int]:
    """Insert an open attempt for each release; their ids, in the same order."""
    using, lease = account.using, timedelta(seconds=conf.current().release_lease)
    attempts = [_attempt(made, account.now, lease) for made in releases]
    ids = database.insert_each(tables.CallAttempt, using, attempts)
    if ids[0] is not None:
        return [pk or 0 for pk in ids]
    calls = [made.candidate.id for made in releases]
    inserted = tables.attempts(using).open().filter(call_id__in=calls)
    id_of = dict(inserted.values_list("call_id", "pk"))
    return [id_of[call] for call in calls]


def _attempt(made: Release, now: int, lease: timedelta) -> dict[str, Any]:
    call = made.candidate
    return {
        "call_id": call.id,
        "number": call.last_attempt + 1,
        "rule": call.rule,
        "key": call.key,
        "queue": made.queue,
        "cost": call.cost,
        "calls": cost_of(call.cost, "calls"),
        "released_at": from_us(now),
        "send_at": None if made.send_at is None else from_us(made.send_at),
        "lease_until": from_us(made.send_at or now) + lease,
        "outcome": states.OPEN,
        "response_body": "",
        "error_message": "",
        "worker": "",
    }


def remember(account: Account, rows: Mapping[str, LockedRule], releases: Sequence[Release]) -> None:
    """Keep what the next pass wants to know in the rules' rows: turns, and what was free. Nothing
    new, nothing written.

    After releases a row is written always: under an isolation stricter than `read committed`, that
    is what makes a pass fail which saw less than was released. It counts the passes of every rule
    that released, and each row names the group that had the last pass, so that what another group
    of rules remembers of one of them is not believed any more.
    """
    ledger.save(account)
    served = _served(rows, releases)
    first, group = min(rows), sorted(rows)
    changed = {
        name
        for name, row in rows.items()
        if served[name] != row.served or row.memo.get("group") != group
    }
    if changed or not _is_remembered(rows, first, account):
        changed.add(first)
    passes = {name: row.passes + (name in changed) for name, row in rows.items()}
    memos = {name: {**rows[name].memo, "group": group} for name in changed}
    if first in changed:
        memos[first] = account.memo.dump(passes)
    fresh = [
        {"pk": name, "served": served[name], "memo": memos[name], "passes": passes[name]}
        for name in sorted(changed)
    ]
    database.update_each(tables.RuleState, account.using, fresh)


def _served(rows: Mapping[str, LockedRule], releases: Sequence[Release]) -> dict[str, int]:
    """When each rule was served last, by a number that counts on."""
    served = {name: row.served for name, row in rows.items()}
    clock = max(served.values(), default=0)
    for number, made in enumerate(releases, start=clock + 1):
        served[made.candidate.rule] = number
    return served


def _is_remembered(rows: Mapping[str, LockedRule], first: str, account: Account) -> bool:
    """Whether the first row holds already all that is to be remembered."""
    fresh = account.memo.dump({name: row.passes for name, row in rows.items()})
    return json.dumps(fresh, sort_keys=True) == json.dumps(rows[first].memo, sort_keys=True)
