"""The waiting set: which calls of a rule may go next, found without reading the backlog.

Calls go by priority, then by the time they were due. Where limits or holds are per key, the keys
take turns. Every pair of priority and key that has calls ready has a row. Those that may go are
looked at by priority, and there by when each was served last. A key that may not go says what it
waits for, and is not looked at again until that is free: blocked keys cost nothing, however many
there are. Callers hold the lock of the rule's row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from callqueue import database, states, tables
from callqueue.database import quoted, rows
from callqueue.ledger.tallies import Scope
from callqueue.limits.kinds import SECOND

PROMOTED = 2000  # calls that one promotion makes ready at most
PRIORITIES = 16  # levels of priority that those who only look tell apart
TABLE = "callqueue_callqueue"
TOP = 40_000  # higher than any priority
WAITING = f"status IN ({database.listed(states.WAITING)})"
READY = f"ready AND {WAITING} AND rule = %s"


@dataclass(frozen=True)
class Asked:
    """What a permit wants besides what a call does. `owner`: who waits for it; `until`: the last
    instant (microseconds) at which it is to begin, None: any.

    `lease`: where this process itself waits for it, and begins it as soon as it is charged, for how
    many seconds.
    """

    owner: str
    label: str = ""
    until: int | None = None
    lease: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A call that might be released, or a permit: what was `asked`, and `id` is of its request.

    `queue`: by which it went before, if it did.
    """

    id: int
    rule: str
    key: str
    priority: int
    cost: Any
    method: str
    last_attempt: int
    queue: str = ""
    due_at: datetime | None = None
    asked: Asked | None = None

    @property
    def order(self) -> tuple[int, datetime]:
        """By this, lowest first, calls of a rule and permits go."""
        return -self.priority, self.due_at or database.EPOCH


def promote(using: str, limit: int = PROMOTED) -> int:
    """Make calls ready that are due: scheduled ones, retries, others' rows. The count."""
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
    return len(ids)


def next_due_in(using: str, after: datetime | None = None) -> float:
    """Seconds until the next call that is not ready becomes due, by the database's clock; a day
    where there is none.

    `after`: what was due by then is left out. If a promotion since then has not made it ready,
    somebody has it locked.
    """
    rows = (
        tables.calls(using)
        .waiting()
        .filter(ready=False)
        .order_by("due_at_dt")
        .values_list("due_at_dt", flat=True)
    )
    rows = rows if after is None else rows.filter(due_at_dt__gt=after)
    due = next(iter(rows[:1]), None)
    return 86400.0 if due is None else (due - database.clock(using)).total_seconds()


def rules_with_ready(using: str, rules: Sequence[str]) -> set[str]:
    """Which of these rules have a call that is ready. One index look-up each."""
    dual = " FROM DUAL" if database.is_mysql(using) else ""
    table = tables.name(using, "CallQueue")
    one = f"SELECT %s{dual} WHERE EXISTS (SELECT 1 FROM {table} WHERE {READY})"
    return {rule for (rule,) in database.of_each(using, [(one, (rule, rule)) for rule in rules])}


def rules_of_ready(using: str) -> list[str]:
    """The rules that ready calls name, whether the settings know them or not."""
    where = f"ready AND {WAITING}"
    found: list[str] = database.distinct_next(
        using, TABLE, "rule", where, [], after="", down=False, count=1000
    )
    return found


def of_rule_sql(rule: str) -> str:
    """The condition of the ready calls of the rule that an expression names."""
    return READY.replace("%s", rule)


def first(
    using: str, rule: str, count: int, least: int = -TOP, *, locks: bool = True
) -> list[Candidate]:
    """The next `count` calls of a rule, of priority `least` or higher, locked; calls that someone
    else has locked are passed over. Without `locks`, for who will not release them, all.
    """
    where, params = READY, list[Any]([rule])
    if least > -TOP:
        where, params = f"{where} AND priority >= %s", [*params, least]
    where += f" ORDER BY priority DESC, due_at_dt, id LIMIT {int(count)}"
    return _candidates(using, where, params, locks=locks)


def priorities(using: str, rule: str) -> list[int]:
    """The priorities that ready calls of the rule have, highest first."""
    found: list[int] = database.distinct_next(
        using, TABLE, "priority", READY, [rule], after=TOP, down=True, count=PRIORITIES
    )
    return found


def pairs(
    using: str, rule: str, after: tuple[int, str] | None, count: int
) -> list[tuple[int, str]]:
    """The next `count` pairs of priority and key past `after` that have ready calls: highest
    priority first, then by key.
    """
    return database.pairs_next(
        using, TABLE, "priority", "key", READY, [rule], after or (TOP, ""), count
    )


def sent_after(using: str, rule: str, pk: int, count: int) -> list[tuple[int, str]]:
    """The priorities and keys of ready calls sent after call `pk`; at most `count` pairs."""
    key, table = database.quoted(using, "key"), tables.name(using, "CallQueue")
    sent = f"FROM {table} WHERE id > %s AND {READY} LIMIT {int(count)}"
    sql = f"SELECT DISTINCT priority, {key} {sent}"
    return [(priority, text) for priority, text in database.rows(using, sql, [pk, rule])]


def newest(using: str) -> int:
    """The number of the call that was sent last."""
    return int(
        database.rows(using, f"SELECT MAX(id) FROM {tables.name(using, 'CallQueue')}")[0][0] or 0
    )


def without_ready(using: str, rule: str, wanted: Sequence[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those of the pairs that have no ready call."""
    found = database.first_of_each(
        using, TABLE, ("priority", "key"), READY, [rule], "id", dict.fromkeys(wanted, 1)
    )
    return set(wanted) - {pair for pair, _ in found}


def first_of_pairs(
    using: str, rule: str, counts: dict[tuple[int, str], int]
) -> tuple[list[Candidate], set[tuple[int, str]]]:
    """The next calls of these keys, so many of each, locked: by priority, and there the keys' first
    before any key's second.

    And the keys that have no more ready calls than those.
    """
    wanted = {pair: count + 1 for pair, count in counts.items()}
    found = database.first_of_each(
        using, TABLE, ("priority", "key"), READY, [rule], "due_at_dt, id", wanted
    )
    place: dict[int, tuple[int, int, int]] = {}
    seen = dict.fromkeys(counts, 0)
    order = {pair: i for i, pair in enumerate(counts)}
    for pair, pk in found:
        if seen[pair] < counts[pair]:
            place[pk] = (-pair[0], seen[pair], order[pair])
        seen[pair] += 1
    last = {pair for pair, count in seen.items() if count <= counts[pair]}
    if not place:
        return [], last
    candidates = _candidates(using, f"{WAITING} AND id IN ({database.listed(place)})", [])
    return sorted(candidates, key=lambda candidate: place[candidate.id]), last


def _candidates(
    using: str, where: str, params: list[Any], *, locks: bool = True
) -> list[Candidate]:
    columns = _columns(using)
    source = f"{tables.name(using, 'CallQueue')} c"
    locking = database.skip_locked(using) if locks else ""
    sql = f"SELECT {columns.sql} FROM {source} WHERE {where}{locking}"
    return [Candidate(*row) for row in columns.rows(sql, params)]


@lru_cache
def _columns(using: str) -> database.Columns:
    names = (
        "id",
        "rule",
        "key",
        "priority",
        "cost",
        "method",
        "last_attempt",
        "queue",
        "due_at_dt",
    )
    return database.Columns(using, {"c": (tables.CallQueue, names)})


HOLD, LOCK = "hold", "lock"  # what a key may wait for, besides room in a limit and an answer
STEPS = 256  # pairs that one pass steps over to find new ones
AT_LEAST = 300 * SECOND  # after which a key that waits for room is looked at in any case
ANSWERED = 2 * SECOND  # after which one is looked at that waits for an answer
LIFTED = 30 * SECOND  # after which one is looked at that is held: the hold may be lifted
UNLOCKED = SECOND // 2  # after which one is looked at whose calls somebody had locked
# what was sent since then is looked at first, where there are too many pairs to see all
RECENT = 5 * SECOND


@dataclass(frozen=True)
class Turn:
    """A key's turn at a priority."""

    pk: int
    priority: int
    key: str

    @property
    def pair(self) -> tuple[int, str]:
        return self.priority, self.key


def of_room(scope: Scope) -> str:
    """What a key waits for that waits for room in a budget."""
    return hashlib.sha256("\x1f".join(scope).encode()).hexdigest()[:32]


def of_answer(scope: Scope) -> str:
    """What a key waits for that waits for an answer to one of the budget's calls."""
    return of_room(("answer", *scope))  # type: ignore[arg-type]


def wake(using: str, rules: Sequence[str], until: int, freed: Iterable[str]) -> None:
    """Let the keys be looked at again that wait until then at most, or for one of `freed`."""
    table, listed = tables.name(using, "KeyTurn"), sorted(freed)
    of_rules = f"rule IN ({database.places(rules)})"
    blocked = f"UPDATE {table} SET blocked_on = '' WHERE {of_rules} AND blocked_on <> ''"
    first = listed[:1000]
    or_freed = f" OR blocked_on IN ({database.places(first)})" if first else ""
    database.run(using, f"{blocked} AND (blocked_until <= %s{or_freed})", [*rules, until, *first])
    for start in range(1000, len(listed), 1000):
        some = listed[start : start + 1000]
        database.run(
            using, f"{blocked} AND blocked_on IN ({database.places(some)})", [*rules, *some]
        )


def lock(using: str, rules: Sequence[str]) -> None:
    """Lock the rows of these rules, in their order. Waits for a pass to end."""
    states = tables.rule_states(using).filter(rule__in=rules).order_by("rule")
    list(database.locked(states, wait=True).values_list("pk"))


def wake_all(using: str, rules: Sequence[str]) -> None:
    """Wake all keys of these rules: limits or holds have changed. Waits for a pass to end."""
    with database.writing(using):
        lock(using, rules)
        _turns(using).filter(rule__in=rules).exclude(blocked_on="").update(blocked_on="")


def discover(using: str, rule: str, now: int, places: dict[str, list[Any]]) -> bool:
    """Give new pairs of priority and key a turn; whether all there are have been seen.

    Steps on from where the last look stopped, over STEPS pairs; where there are more, those of
    calls sent lately come first.
    """
    place = places.get(rule) or [TOP, "", now]
    begins, after = place[0] == TOP, (int(place[0]), str(place[1]))
    found = pairs(using, rule, after, STEPS)
    if begins and len(found) < STEPS:
        _add(using, rule, dict.fromkeys(found, now))
        places.pop(rule, None)
        return True
    # Since when those found now may have waited for it to come to them.
    began = now if begins else int(place[2])
    lately = dict.fromkeys(_sent_lately(using, rule, now, place), now)
    _add(using, rule, {**lately, **dict.fromkeys(found, began)})
    last = found[-1] if len(found) == STEPS else (TOP, "")
    places[rule] = [*last, began, *_sent_until(using, now, place)]
    return False


def has_wrapped(rule: str, places: Mapping[str, Sequence[Any]]) -> bool:
    """Whether the last look for new pairs came to the end of them."""
    return bool(places[rule][0] == TOP)


def free(using: str, rule: str, count: int) -> list[Turn]:
    """The next `count` turns of keys that may go, for all that is known."""
    sql = (
        f"SELECT id, priority, {quoted(using, 'key')} FROM {tables.name(using, 'KeyTurn')} "
        f"WHERE rule = %s AND blocked_on = '' ORDER BY priority DESC, served, id LIMIT {int(count)}"
    )
    return [Turn(*row) for row in rows(using, sql, [rule])]


def end(using: str, rule: str, without: Sequence[Turn]) -> dict[int, tuple[str, int]]:
    """Of turns for which no call was found, take away those of keys that have none; the others,
    whose calls are locked.
    """
    if not without:
        return {}
    gone = without_ready(using, rule, [turn.pair for turn in without])
    _turns(using).filter(pk__in=[turn.pk for turn in without if turn.pair in gone]).delete()
    return {turn.pk: (LOCK, 0) for turn in without if turn.pair not in gone}


def save(
    using: str,
    served: Mapping[int, int],
    blocked: Mapping[int, tuple[str, int]],
    spent: Sequence[int] = (),
) -> None:
    """Write when turns were served, and what others wait for until when; take away those of keys
    that have no call left.
    """
    if spent:
        database.delete_each(tables.KeyTurn, using, spent)
    database.update_each(
        tables.KeyTurn,
        using,
        [{"pk": pk, "served": at} for pk, at in served.items() if pk not in set(spent)],
    )
    waits = [
        {"pk": pk, "blocked_on": what, "blocked_until": until}
        for pk, (what, until) in blocked.items()
    ]
    database.update_each(tables.KeyTurn, using, waits)


def next_wake(using: str, rules: Sequence[str]) -> int | None:
    """The first instant at which a key that waits is to be looked at again."""
    table = tables.name(using, "KeyTurn")
    one = f"SELECT MIN(blocked_until) FROM {table} WHERE rule = %s AND blocked_on <> ''"
    found = database.of_each(using, [(one, (rule,)) for rule in rules])
    return min((int(at) for (at,) in found if at is not None), default=None)


def _sent_lately(using: str, rule: str, now: int, place: Sequence[Any]) -> list[tuple[int, str]]:
    if len(place) < 6 or not 0 <= now - place[5] <= RECENT:
        return []
    return sent_after(using, rule, place[3], STEPS)


def _sent_until(using: str, now: int, place: Sequence[Any]) -> list[int]:
    """The call sent last at two instants, and the later of them: a call that commits late has half
    a second to be seen.
    """
    if len(place) == 6 and 0 <= now - place[5] < SECOND // 2:
        return list(place[3:])
    last = newest(using)
    before = place[4] if len(place) == 6 and 0 <= now - place[5] <= RECENT else last
    return [before, last, now]


def _add(using: str, rule: str, pairs: Mapping[tuple[int, str], int]) -> None:
    """Give turns to those pairs that have none: as if served at these instants."""
    if not pairs:
        return
    keys = list({key for _, key in pairs})
    known = set(_turns(using).filter(rule=rule, key__in=keys).values_list("priority", "key"))
    new = {pair: at for pair, at in pairs.items() if pair not in known}
    if new:
        made = [
            tables.KeyTurn(rule=rule, priority=priority, key=key, served=at)
            for (priority, key), at in new.items()
        ]
        _turns(using).bulk_create(made, ignore_conflicts=True)


def _turns(using: str) -> Any:
    return tables.KeyTurn.objects.using(using)
