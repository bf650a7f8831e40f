"""The waiting set: which calls of a rule may go next, found without reading the backlog.

Calls go by priority, then by when they were due. Where limits or holds are per key, keys take
turns: each pair of priority and key with ready calls has a row, and a blocked one is not looked at
until what it waits for is free. Callers hold the lock of the rule's row, but for those who give
news.

No turn is lost, and no sender waits: who makes a call ready inserts news of its key in the same
transaction, into a table where nobody locks what is not committed. A pass takes news first, gives
turns, then looks for calls, and deletes a turn without any. The news of a call that is committed
after that look is untaken: the next pass takes it. `give_missing_news` finds what came without.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from typing import Any

from callqueue import database, states, tables
from callqueue.clocks import Us
from callqueue.database import quoted, rows, run
from callqueue.handlers import HTTP_METHODS
from callqueue.ledger import rule_rows
from callqueue.ledger.tallies import Scope
from callqueue.limits.kinds import SECOND

PROMOTED = 2000  # calls that one promotion makes ready at most
TABLE = "callqueue_callqueue"
TOP = 40_000  # higher than any priority
WAITING = f"status IN ({database.listed(states.WAITING)})"
READY = f"ready AND {WAITING} AND rule = %s"


@dataclass
class Candidate:
    """A call that might be released, and its release once a pass has chosen it."""

    id: int
    rule: str
    key: str
    priority: int
    cost: Any
    method: str
    last_attempt: int
    queue: str = ""  # by which it went before, or goes now
    expires_at: datetime | None = None  # it is not to begin after that
    send_at: Us | None = None  # None: at once
    attempt_id: int = 0
    waits: bool = False  # its slot is still to open, or workers are behind
    is_begun: bool = False  # with its charge, so that it is not to be published

    @property
    def is_permit(self) -> bool:
        """Whether a block of code waits to make it: it is charged, and nobody is sent it."""
        return self.method == states.PERMIT


def promote_due(using: str, limit: int = PROMOTED) -> int:
    """Make due calls ready that nobody has locked, and give news of their keys; how many."""
    rows = (
        tables.calls(using)
        .waiting()
        .filter(ready=False, due_at_dt__lte=database.ClockNow())
        .order_by("due_at_dt")
    )
    with database.writing(using):
        ids = list(database.locked(rows).values_list("pk", flat=True)[:limit])
        if ids:
            tables.calls(using).filter(pk__in=ids).update(ready=True)
            tell_of_keys(using, ids)
    return len(ids)


def next_due_in(using: str, after: datetime | None = None) -> float:
    """Seconds until the next call becomes due (below 0: since), by the database's clock; a day if
    none. Without what was due by `after`: a promotion passed it over, as somebody has it locked.
    """
    rows = (
        tables.calls(using)
        .waiting()
        .filter(ready=False)
        .order_by("due_at_dt")
        .values_list("due_at_dt", flat=True)
    )
    due = (rows if after is None else rows.filter(due_at_dt__gt=after)).first()
    return 86400.0 if due is None else (due - database.clock(using)).total_seconds()


def rules_with_ready(using: str, rules: Sequence[str]) -> set[str]:
    """Which of these rules have a call that is ready. One index look-up each."""
    dual = " FROM DUAL" if database.is_mysql(using) else ""
    table = tables.name(using, "CallQueue")
    one = f"SELECT %s{dual} WHERE EXISTS (SELECT 1 FROM {table} WHERE {READY})"
    return {rule for (rule,) in database.union_all(using, [(one, (rule, rule)) for rule in rules])}


def rules_named_by_ready(using: str) -> list[str]:
    """The rules of ready calls, whether the settings know them or not. The first 1000."""
    where = f"ready AND {WAITING}"
    found: list[str] = database.next_distinct(
        using, TABLE, "rule", where, [], after="", down=False, count=1000
    )
    return found


def lock_next(
    using: str,
    rule: str,
    wall: datetime,
    count: int,
    least_priority: int = -TOP,
    *,
    is_http: bool | None = None,
) -> list[Candidate]:
    """Lock the next `count` calls of a rule that have not expired, passing over what is locked.
    `is_http`: HTTP calls only, or others only, None: all; those of permits always.
    """
    where, params = _may_go_sql(using, rule, wall)
    if is_http is not None:
        own = {states.PERMIT} if is_http else ()
        listed = ", ".join(f"'{method}'" for method in sorted(HTTP_METHODS.union(own)))
        where += f" AND method {'' if is_http else 'NOT '}IN ({listed})"
    if least_priority > -TOP:
        where, params = f"{where} AND priority >= %s", [*params, least_priority]
    where += f" ORDER BY priority DESC, due_at_dt, id LIMIT {int(count)}"
    return _lock_calls(using, where, params)


def lock_next_of_pairs(
    using: str, rule: str, wall: datetime, counts: dict[tuple[int, str], int]
) -> tuple[list[Candidate], dict[tuple[int, str], int]]:
    """Lock the next calls of these (priority, key), so many of each: by priority, and there the
    keys' first before any key's second. And how many ready calls each has, locked ones too, counted
    up to one more. Where others have locked some, the key's next go: one statement for each key.
    """
    where, params = _may_go_sql(using, rule, wall)
    wanted = {pair: count + 1 for pair, count in counts.items()}
    found = database.first_ids_of_each(
        using, TABLE, ("priority", "key"), where, params, "due_at_dt, id", wanted
    )
    first: dict[tuple[int, str], list[int]] = {pair: [] for pair in counts}
    for pair, pk in found:
        first[pair].append(pk)
    seen = {pair: len(pks) for pair, pks in first.items()}
    pks = [pk for pair, listed in first.items() for pk in listed[: counts[pair]]]
    free = _lock_calls(using, f"{WAITING} AND id IN ({database.listed(pks)})", []) if pks else []
    place_of = {pk: place for place, pk in enumerate(pks)}
    by_pair: dict[tuple[int, str], list[Candidate]] = {pair: [] for pair in counts}
    for one in sorted(free, key=lambda candidate: place_of[candidate.id]):
        # Other code may have changed one before it was locked: of another rule or key nothing goes.
        if one.rule == rule and one.id in first.get((one.priority, one.key), ()):
            by_pair[one.priority, one.key].append(one)
    key = quoted(using, "key")
    for pair, calls in by_pair.items():
        if len(calls) < min(counts[pair], seen[pair]):
            own = f"{where} AND priority = %s AND {key} = %s ORDER BY due_at_dt, id LIMIT"
            by_pair[pair] = _lock_calls(using, f"{own} {counts[pair]}", [*params, *pair])
    order = {pair: i for i, pair in enumerate(counts)}
    placed = [
        ((-pair[0], place, order[pair]), one)
        for pair, calls in by_pair.items()
        for place, one in enumerate(calls)
    ]
    return [one for _, one in sorted(placed, key=itemgetter(0))], seen


def _may_go_sql(using: str, rule: str, wall: datetime) -> tuple[str, list[Any]]:
    where = f"{READY} AND (expires_at_dt IS NULL OR expires_at_dt > %s)"
    return where, [rule, database.as_parameter(using, wall)]


def _lock_calls(using: str, where: str, params: list[Any]) -> list[Candidate]:
    columns = _candidate_columns(using)
    source = f"{tables.name(using, 'CallQueue')} c"
    locking = database.skip_locked_sql(using)
    sql = f"SELECT {columns.sql} FROM {source} WHERE {where}{locking}"
    # found by its id, one may be ready no more
    return [Candidate(*row) for *row, is_ready in columns.rows(sql, params) if is_ready]


@lru_cache
def _candidate_columns(using: str) -> database.Columns:
    names = (
        "id",
        "rule",
        "key",
        "priority",
        "cost",
        "method",
        "last_attempt",
        "queue",
        "expires_at_dt",
        "ready",
    )
    return database.Columns(using, {"c": (tables.CallQueue, names)})


HOLD, LOCK = "hold", "lock"  # what a key may wait for, besides room in a limit and an answer
TAKEN = 2000  # news of keys that one pass takes at most, and keys that are looked at for want of it
KeyAtPriority = tuple[str, int]  # the other way round than `Turn.pair`
FIRST = "", -TOP  # less than any
AT_LEAST = 300 * SECOND  # after which a key that waits for room is looked at in any case
ANSWERED = 2 * SECOND  # after which one is looked at that waits for an answer
# after which one is looked at that waits behind a costlier call, at least
GONE = 3 * SECOND // 2
LIFTED = 30 * SECOND  # after which one is looked at that is held: the hold may be lifted
UNLOCKED = SECOND // 2  # after which one is looked at whose calls somebody had locked


@dataclass(frozen=True)
class Turn:
    pk: int
    priority: int
    key: str

    @property
    def pair(self) -> tuple[int, str]:
        return self.priority, self.key


def blocked_on_room(scope: Scope) -> str:
    """What `blocked_on` holds in the turn of a key that waits for room in this scope."""
    return hashlib.sha256("\x1f".join(scope).encode()).hexdigest()[:32]


def blocked_on_answer(scope: Scope) -> str:
    return blocked_on_room(("answer", *scope))  # type: ignore[arg-type]


def wake_keys(
    using: str, rules: Sequence[str], until: Us, latest: int, freed: Iterable[str]
) -> None:
    """Let keys be looked at again whose wait ends by `until`, or is for one of `freed`; and those
    whose wait ends past `latest`: none is so long, unless the clock was set back since.
    """
    listed = ", ".join(f"'{one}'" for one in sorted(freed)) or "NULL"  # digests, safe in SQL
    run(
        using,
        f"UPDATE {tables.name(using, 'KeyTurn')} SET blocked_on = '' "
        f"WHERE rule IN ({database.placeholders(rules)}) AND blocked_on <> '' "
        f"AND (blocked_until <= %s OR blocked_until > %s OR blocked_on IN ({listed}))",
        [*rules, until, latest],
    )


def wake_all_keys(using: str, rules: Sequence[str]) -> None:
    """Wake all keys of these rules, in a transaction: limits or holds changed. Waits for a pass."""
    rule_rows.lock(using, rules)
    _turns(using).filter(rule__in=rules).exclude(blocked_on="").update(blocked_on="")


def tell_of_keys(using: str, pks: Iterable[int]) -> None:
    """Give news of the keys of these calls, where they were made ready, in their transaction."""
    columns = f"rule, priority, {quoted(using, 'key')}"
    run(
        using,
        f"INSERT INTO {tables.name(using, 'KeyNews')} ({columns}) SELECT DISTINCT {columns} "
        f"FROM {tables.name(using, 'CallQueue')} WHERE id IN ({database.listed(pks)}) AND ready",
    )


def wake_key(using: str, rule: str, priority: int, key: str) -> None:
    own = _turns(using).filter(rule=rule, priority=priority, key=key)
    own.exclude(blocked_on="").update(blocked_on="")


def give_missing_news(using: str, rule: str, after: KeyAtPriority = FIRST) -> KeyAtPriority | None:
    """Of the next TAKEN keys past `after` with ready calls, give news of those that have neither
    turn nor news. The last key looked at, for the next time; None where there are no more.
    """
    key, pairs = quoted(using, "key"), ("key", "priority")
    source, params = database.distinct_pairs_sql(
        using, TABLE, pairs, READY, [rule], after=after, count=TAKEN
    )
    known = " OR ".join(
        f"EXISTS (SELECT 1 FROM {tables.name(using, model)} t "
        f"WHERE t.rule = %s AND t.{key} = v.a AND t.priority = v.b)"
        for model in ("KeyTurn", "KeyNews")
    )
    sql = f"SELECT v.a, v.b, {known} FROM ({source}) v ORDER BY v.a, v.b"
    found = rows(using, sql, [rule, rule, *params])
    fresh = [
        {"rule": rule, "priority": priority, "key": text}
        for text, priority, is_known in found
        if not is_known
    ]
    database.insert_each(tables.KeyNews, using, fresh)
    return tuple(found[-1][:2]) if len(found) == TAKEN else None


def take_news(using: str, rules: Sequence[str], now: Us) -> bool:
    """Give turns to the keys of the next TAKEN news, and delete it; whether some may be left."""
    columns, share = f"id, rule, priority, {quoted(using, 'key')}", -(-TAKEN // max(1, len(rules)))
    of_rule = f"SELECT {columns} FROM {tables.name(using, 'KeyNews')} WHERE rule = %s"
    one = f"SELECT * FROM ({of_rule} ORDER BY priority DESC LIMIT {share}) x"
    taken = database.union_all(using, [(one, (rule,)) for rule in rules])
    if not taken:
        return False
    named = dict.fromkeys((rule, priority, key) for _, rule, priority, key in sorted(taken))
    same = _turns(using).filter(rule__in=rules, key__in={key for _, _, key in named})
    known = set(same.values_list("rule", "priority", "key"))
    _turns(using).bulk_create(
        tables.KeyTurn(rule=rule, priority=priority, key=key, served=now)
        for rule, priority, key in named
        if (rule, priority, key) not in known
    )
    database.delete_each(tables.KeyNews, using, sorted(pk for pk, *_ in taken))
    return max(Counter(rule for _, rule, *_ in taken).values()) == share


def forget_news(using: str, but: Sequence[str]) -> None:
    """Forget the news of all rules but these: their keys take no turns."""
    table = tables.name(using, "KeyNews")
    told = database.next_distinct(
        using, table, "rule", "1 = 1", [], after="", down=False, count=1000
    )
    others = [rule for rule in told if rule not in but]
    news = tables.KeyNews.objects.using(using).filter(rule__in=others).values_list("pk", flat=True)
    while pks := list(news[:TAKEN]):
        database.delete_each(tables.KeyNews, using, pks)


def next_turns(using: str, rule: str, count: int) -> list[Turn]:
    sql = (
        f"SELECT id, priority, {quoted(using, 'key')} FROM {tables.name(using, 'KeyTurn')} "
        f"WHERE rule = %s AND blocked_on = '' ORDER BY priority DESC, served, id LIMIT {int(count)}"
    )
    return [Turn(*row) for row in rows(using, sql, [rule])]


def spent_turns(using: str, rule: str, wall: datetime) -> list[int]:
    """Of the next TAKEN turns not blocked, the ids of those whose keys have no call that may go."""
    where, params = _may_go_sql(using, rule, wall)
    turns = next_turns(using, rule, TAKEN)
    one_of_each = dict.fromkeys((turn.pair for turn in turns), 1)
    found = database.first_ids_of_each(
        using, TABLE, ("priority", "key"), where, params, "due_at_dt, id", one_of_each
    )
    ready = {pair for pair, _ in found}
    return [turn.pk for turn in turns if turn.pair not in ready]


def save_turns(
    using: str,
    served: Mapping[int, int],
    blocked: Mapping[int, tuple[str, int]],
    spent: Sequence[int] = (),
) -> None:
    """Write when turns were served, and what others wait for until when; delete the spent ones."""
    if spent:
        database.delete_each(tables.KeyTurn, using, spent)
    database.update_each(
        tables.KeyTurn,
        using,
        [{"pk": pk, "served": at} for pk, at in served.items() if pk not in set(spent)],
    )
    waits = [
        {"pk": pk, "blocked_on": blocked_on, "blocked_until": until}
        for pk, (blocked_on, until) in blocked.items()
    ]
    database.update_each(tables.KeyTurn, using, waits)


def next_wake_of_keys(using: str, rules: Sequence[str]) -> Us | None:
    """Until when the first blocked key waits; None: no key is blocked."""
    table = tables.name(using, "KeyTurn")
    one = f"SELECT MIN(blocked_until) FROM {table} WHERE rule = %s AND blocked_on <> ''"
    found = database.union_all(using, [(one, (rule,)) for rule in rules])
    return min((Us(at) for (at,) in found if at is not None), default=None)


def _turns(using: str) -> Any:
    return tables.KeyTurn.objects.using(using)
