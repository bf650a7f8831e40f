"""Writes what a pass releases: calls become DISPATCHED, an open attempt of each stands in the
ledger, and of each permit that is granted too, and the rules' rows remember what the next pass
wants to know.

In: an account and releases. Out: the attempts to publish. Callers hold the lock of the rules' rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from callqueue import conf, database, states, tables, transitions
from callqueue.database import from_us
from callqueue.dispatch.planning import Release
from callqueue.ledger import account as ledger
from callqueue.ledger.account import Account
from callqueue.ledger.memo import name_of
from callqueue.limits.budgets import cost_of

# seconds after its slot in which a permit that is granted is to be taken up; its waiter looks more
# often than that, unless it has died
CLAIMED = 5.0


@dataclass(frozen=True)
class Released:
    """An attempt that is charged and may be published.

    `waits`: no worker would make its call at once, since its slot is still to open, or workers are
    behind.
    """

    attempt_id: int
    queue: str
    method: str
    rule: str
    waits: bool = False


@dataclass(frozen=True)
class Charged:
    """What a pass has charged: attempts of calls, to be published, and of permits, by owner."""

    released: list[Released]
    granted: Mapping[str, int]


@dataclass(frozen=True)
class LockedRule:
    """A rule's row, locked: how many passes released, when it was served last, what passes
    remember, and by which agreement they go.

    `is_corrected`: whether some of the rule's attempts cost something else than the tallies know;
    `has_permits`: whether permits wait for their turn; `has_calls`: whether calls are ready.
    """

    passes: int
    served: int
    memo: dict[str, Any]
    agreement: str
    is_corrected: bool
    has_permits: bool = False
    has_calls: bool = True


def charge(account: Account, releases: Sequence[Release]) -> Charged:
    """Write the releases: the calls are DISPATCHED, and an open attempt of each stands in the
    ledger, and of each permit. A statement for each queue, and one or two for the attempts.
    """
    calls = [made for made in releases if made.candidate.asked is None]
    permits = [made for made in releases if made.candidate.asked is not None]
    by_queue: dict[str, list[int]] = {}
    for made in calls:
        by_queue.setdefault(made.queue, []).append(made.candidate.id)
    transitions.release(account.using, by_queue, account.now)
    ids = _insert_attempts(account, calls + permits) if releases else []
    granted = {
        made.candidate.asked.owner: attempt_id
        for attempt_id, made in zip(ids[len(calls) :], permits, strict=True)
        if made.candidate.asked is not None
    }
    _grant(account.using, permits, granted)
    return Charged(_released(account, ids[: len(calls)], calls), granted)


def _released(account: Account, ids: Sequence[int], calls: Sequence[Release]) -> list[Released]:
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
        for attempt_id, made in zip(ids, calls, strict=True)
    ]


def _grant(using: str, permits: Sequence[Release], granted: Mapping[str, int]) -> None:
    """Tell those who wait for these permits. Who makes this pass for itself waits no more."""
    requests = tables.permit_requests(using)
    for made in permits:
        asked = made.candidate.asked
        if asked is not None and made.candidate.id:
            own = requests.filter(pk=made.candidate.id)
            own.delete() if asked.lease is not None else own.update(attempt_id=granted[asked.owner])


def _insert_attempts(account: Account, releases: Sequence[Release]) -> list[int]:
    """Insert an open attempt for each release; their ids, in the same order."""
    using, lease = account.using, timedelta(seconds=conf.current().release_lease)
    at = from_us(account.now)
    attempts = [_attempt(made, at, lease) for made in releases]
    ids = database.insert_each(tables.CallAttempt, using, attempts)
    if ids[0] is not None:
        return [pk or 0 for pk in ids]
    whose = [(one["call_id"], one["worker"]) for one in attempts]
    calls, owners = [pk for pk, _ in whose if pk], [owner for _, owner in whose if owner]
    is_one = Q(call_id__in=calls) | Q(call_id__isnull=True, worker__in=owners)
    inserted = tables.attempts(using).open().filter(is_one)
    found = list(inserted.values_list("call_id", "worker", "pk"))
    id_of = {(call, "" if call else owner): pk for call, owner, pk in found}
    return [id_of[one] for one in whose]


def _attempt(made: Release, now: datetime, lease: timedelta) -> dict[str, Any]:
    call, asked = made.candidate, made.candidate.asked
    is_begun = asked is not None and asked.lease is not None
    if asked is not None:
        lease = timedelta(seconds=CLAIMED if asked.lease is None else asked.lease)
    send_at = None if made.send_at is None else from_us(made.send_at)
    return {
        "call_id": call.id if asked is None else None,
        "label": "" if asked is None else asked.label,
        "number": call.last_attempt + 1,
        "rule": call.rule,
        "key": call.key,
        "queue": made.queue,
        "cost": call.cost,
        "calls": cost_of(call.cost, "calls"),
        "released_at": now,
        "send_at": send_at,
        "lease_until": (send_at or now) + lease,
        "started_at": now if is_begun else None,
        "outcome": states.OPEN,
        "response_body": "",
        "error_message": "",
        "worker": "" if asked is None else asked.owner,
    }


def remember(account: Account, rows: Mapping[str, LockedRule], releases: Sequence[Release]) -> None:
    """Keep what the next pass wants to know in the rules' rows: turns, and what was free. Nothing
    new, nothing written.

    After releases a row is written always: under an isolation stricter than `read committed`, that
    is what makes a pass fail which saw less than was released. It counts the passes of every rule
    that released, and each row names the group that had the last pass, and by which agreement, so
    that what another group of rules remembers of one of them is not believed any more.
    """
    ledger.save(account)
    served = _served(rows, releases)
    agreement = account.book.agreement
    first, group = min(rows), name_of(rows, agreement)
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
        memos[first] = account.memo.dump(passes, agreement)
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
    passes = {name: row.passes for name, row in rows.items()}
    fresh = account.memo.dump(passes, account.book.agreement)
    return json.dumps(fresh, sort_keys=True) == json.dumps(rows[first].memo, sort_keys=True)
