"""The turns of keys: which keys of a rule a pass looks at, when limits or holds are per key.

Every pair of priority and key that has calls ready has a row. Those that may go are looked at by
priority, and there by when each was served last. A key that may not go says what it waits for, and
is not looked at again until that is free: blocked keys cost nothing, however many there are.
Callers hold the lock of the rule's row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callqueue import database, tables
from callqueue.database import quoted, rows
from callqueue.ledger import ready_calls
from callqueue.ledger.tallies import Scope
from callqueue.limits.kinds import SECOND

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


def set_back(using: str, now: int) -> None:
    """The clock has jumped: wake keys that wait for an instant, and set turns back to now."""
    _turns(using).exclude(blocked_on="").update(blocked_on="")
    _turns(using).filter(served__gt=now).update(served=now)


def discover(using: str, rule: str, now: int, places: dict[str, list[Any]]) -> bool:
    """Give new pairs of priority and key a turn; whether all there are have been seen.

    Steps on from where the last look stopped, over STEPS pairs; where there are more, those of
    calls sent lately come first.
    """
    place = places.get(rule) or [ready_calls.TOP, "", now]
    begins, after = place[0] == ready_calls.TOP, (int(place[0]), str(place[1]))
    found = ready_calls.pairs(using, rule, after, STEPS)
    if begins and len(found) < STEPS:
        _add(using, rule, dict.fromkeys(found, now))
        places.pop(rule, None)
        return True
    # Since when those found now may have waited for it to come to them.
    began = now if begins else int(place[2])
    lately = dict.fromkeys(_sent_lately(using, rule, now, place), now)
    _add(using, rule, {**lately, **dict.fromkeys(found, began)})
    last = found[-1] if len(found) == STEPS else (ready_calls.TOP, "")
    places[rule] = [*last, began, *_sent_until(using, now, place)]
    return False


def has_wrapped(rule: str, places: Mapping[str, Sequence[Any]]) -> bool:
    """Whether the last look for new pairs came to the end of them."""
    return bool(places[rule][0] == ready_calls.TOP)


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
    gone = ready_calls.without_ready(using, rule, [turn.pair for turn in without])
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
    found = rows(using, " UNION ALL ".join([one] * len(rules)), rules)
    return min((int(at) for (at,) in found if at is not None), default=None)


def _sent_lately(using: str, rule: str, now: int, place: Sequence[Any]) -> list[tuple[int, str]]:
    if len(place) < 6 or not 0 <= now - place[5] <= RECENT:
        return []
    return ready_calls.sent_after(using, rule, place[3], STEPS)


def _sent_until(using: str, now: int, place: Sequence[Any]) -> list[int]:
    """The call sent last at two instants, and the later of them: a call that commits late has half
    a second to be seen.
    """
    if len(place) == 6 and 0 <= now - place[5] < SECOND // 2:
        return list(place[3:])
    newest = ready_calls.newest(using)
    before = place[4] if len(place) == 6 and 0 <= now - place[5] <= RECENT else newest
    return [before, newest, now]


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
