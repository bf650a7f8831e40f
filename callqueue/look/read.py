"""Reads where every rule stands: one look at one moment, which pages, commands, metrics and
forecasts render. Some fourteen statements, however many rules, keys, holds and calls there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callqueue import conf, database, tables
from callqueue.database import as_parameter, from_us, instant_us, loaded, places, quoted, rows
from callqueue.history import sums
from callqueue.ledger import agreement
from callqueue.ledger.ready_calls import READY, WAITING
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.budgets import Book, cost_of, key_part
from callqueue.limits.kinds import SECOND
from callqueue.look import alive, attempts, estimate, limits, waiting
from callqueue.look.attempts import Flight, Pace
from callqueue.look.estimate import Gate, Sizes
from callqueue.look.limits import LimitLook
from callqueue.look.model import FOREVER, HoldLook, Look, RuleLook
from callqueue.look.waiting import Waiting

HOLDS = 5  # on keys or queues that a rule shows
SAMPLE, SAMPLED = 100, 4000  # waiting calls whose mean cost is taken: of a rule, and of all
TOGETHER = 250  # SELECTs that one statement joins


def look(
    using: str,
    *,
    rules: Sequence[str] | None = None,
    rates: Mapping[str, str] | None = None,
    key: str | None = None,
) -> Look:
    """Where these rules stand, or all, as of one moment. `rates`: as if these limits had other
    rates (id in the settings -> rate); `key`: with limits per key as they are for this key, and
    with the pace of the newest calls where none was answered lately.
    """
    with database.one_view(using):
        names = tuple(conf.current().rules if rules is None else rules)
        return _look(using, names, rates or {}, key, whole=rules is None and not rates)


def _look(
    using: str, names: Sequence[str], rates: Mapping[str, str], key: str | None, *, whole: bool
) -> Look:
    now, summed_until, token = _moment(using)
    book = agreement.book_in_force(using, token=token).with_rates(rates)
    # rules that share a limit wait for each other
    group = sorted({one for name in names for one in book.groups[name]})
    shown = [*names, *(one for one in group if one not in names and one in book.settings.rules)]
    signs = alive.signs(using, from_us(now))
    found = attempts.read(using, shown, now)
    keyed = {name for name in shown if any(one.limit.is_keyed for one in book.budgets[name])}
    waits, incoming = waiting.read(using, shown, keyed, now)
    # of all rules, nobody asks what more calls than wait would take
    backlog = {name: one.ready for name, one in waits.items()} if whole else None
    known = _Known(
        using=using,
        book=book,
        now=now,
        waits=waits,
        paces=found.paces if key is None else _newest_paces(using, found.paces, names),
        incoming=incoming,
        limits=limits.read(using, book, shown, now, key=key, backlog=backlog),
    )
    held, keys_held = _holds(using, now)
    recent = sums.recent(using, shown, now // SECOND)
    costs, sizes = _mean_costs(known), _sizes_of_parts(known)
    is_dispensing = any(one.is_alive for one in signs)
    looks = [
        RuleLook(
            name=name,
            rule=book.rules[name],
            now=now,
            is_dispensing=is_dispensing,
            has_fallen_silent=alive.has_fallen_silent(signs),
            waits=known.waits[name],
            flight=found.flights.get(name, Flight()),
            pace=known.paces[name],
            incoming=known.incoming.get(name, 0.0),
            holds=held.get(name, ()),
            hold=_on_all(held.get(name, ()), book.rules[name].queue_names, now),
            keys_held=keys_held.get(name, _KeysHeld()).count,
            kept_calls=keys_held.get(name, _KeysHeld()).calls,
            kept_s=keys_held.get(name, _KeysHeld()).seconds,
            limits=known.limits[name],
            gates=[
                _gate(known, name, one, costs.get((name, one.budget.limit.unit), 1.0), sizes)
                for one in known.limits[name]
            ],
            stalls=[one for one in found.stalls if name in one.rules],
            recent=recent[name],
        )
        for name in names
    ]
    digests = {one.digest for one in signs if one.is_alive and one.digest}
    return Look(
        now=now,
        book=book,
        rules=looks,
        signs=signs,
        workers=found.workers,
        stalls=found.stalls,
        summed_until=summed_until,
        differences=agreement.disagreements(using, digests) if len(digests) > 1 else (),
    )


def _moment(using: str) -> tuple[int, int, str]:
    """The instant that it is now, up to when everything that had ended is added up (0 where nothing
    ever was), and the token of the agreement in force. One statement.
    """
    summed, states = tables.name(using, "Summed"), tables.name(using, "RuleState")
    sql = (
        f"SELECT {database.clock_sql(using)}, (SELECT MAX(until) FROM {summed}), "
        f"(SELECT agreement FROM {states} WHERE rule = %s)"
    )
    ((shown, until, token),) = rows(using, sql, [agreement.ALL])
    now = database.to_us(database.clock(using)) if shown is None else instant_us(shown)
    return now, int(until or 0), token or ""


def _newest_paces(
    using: str, paces: Mapping[str, Pace], names: Sequence[str]
) -> Mapping[str, Pace]:
    """The paces, those of the newest calls where none was answered lately. A statement a rule."""
    unknown = [name for name in names if not paces[name].latency]
    return {**paces, **{name: attempts.newest_pace(using, name) for name in unknown}}


@dataclass(frozen=True)
class _Known:
    """What is known of all rules."""

    using: str
    book: Book
    now: int
    waits: Mapping[str, Waiting]
    paces: Mapping[str, Pace]
    incoming: Mapping[str, float]
    limits: Mapping[str, Sequence[LimitLook]]


def _gate(
    known: _Known, name: str, one: LimitLook, cost: float, sizes: Mapping[tuple[str, str], Sizes]
) -> Gate:
    """The limit as the rule's backlog comes to it."""
    budget, rule = one.budget, known.book.rules[name]
    limit = budget.limit
    if limit.is_keyed:
        spread = sizes.get((name, limit.per), known.waits[name].sizes)
        return Gate(
            limit, one.meter, spread or [(1, 1)], cost=cost, charged_s=_charged_s(known, name, one)
        )
    higher = [n for n in budget.rules if n in known.waits and _priority(known, n) > rule.priority]
    equal = [n for n in budget.rules if n in known.waits and _priority(known, n) == rule.priority]
    return Gate(
        limit,
        one.meter,
        lanes=len(rule.queue_names) if limit.is_per_queue else 1,
        before=sum(known.waits[n].ready for n in higher),
        beside=sum(known.waits[n].ready for n in equal if n != name),
        incoming=sum(known.incoming.get(n, 0.0) for n in higher),
        cost=cost,
        charged_s=_charged_s(known, name, one),
    )


def _priority(known: _Known, name: str) -> int:
    return known.book.rules[name].priority


def _charged_s(known: _Known, name: str, one: LimitLook) -> float:
    """For how many seconds a call is charged before it ages; 0 where nobody knows."""
    limit, pace = one.budget.limit, known.paces[name]
    is_told = pace.is_stamped and not is_tallied(limit)
    return estimate.charged_s(limit, pace.latency, late=pace.late, is_told=is_told)


# --- holds


@dataclass(frozen=True)
class _KeysHeld:
    """Holds on keys of a rule: how many, how many calls they keep back, and for how many seconds
    the last of those.
    """

    count: int = 0
    calls: int = 0
    seconds: float = 0.0


def _holds(using: str, now: int) -> tuple[dict[str, list[HoldLook]], dict[str, _KeysHeld]]:
    """By rule, the holds in force on the whole rule and on queues, and a few of those on keys, the
    last to end first; and what those on keys come to. One statement.
    """
    held: dict[str, list[HoldLook]] = {}
    on_keys: dict[str, _KeysHeld] = {}
    at = as_parameter(using, from_us(now))
    for rule, per, value, until, reason, source, count, calls, is_endless in rows(
        using, _holds_sql(using), [at, at]
    ):
        ends = None if until is None else instant_us(until)
        if per:
            instant = None if ends is None else from_us(ends)
            held.setdefault(rule, []).append(HoldLook(rule, per, value, instant, reason, source))
        else:
            seconds = FOREVER if is_endless else 0.0 if ends is None else (ends - now) / SECOND
            on_keys[rule] = _KeysHeld(int(count), int(calls or 0), seconds)
    return held, on_keys


def _holds_sql(using: str) -> str:
    """The statement: a row for each hold that is shown, and one for those on keys of each rule."""
    holds = tables.name(using, "Hold")
    value, until, key = (quoted(using, name) for name in ("value", "until", "key"))
    place = (
        f"ROW_NUMBER() OVER (PARTITION BY rule, CASE WHEN per IN ('rule', 'queue') THEN 1 ELSE 0 "
        f"END ORDER BY CASE WHEN {until} IS NULL THEN 0 ELSE 1 END, {until} DESC, id)"
    )
    shown = (
        f"SELECT rule, per, {value}, {until}, reason, source, 0 AS held, 0 AS calls, place FROM ("
        f"SELECT rule, per, {value}, {until}, reason, source, {place} AS place FROM {holds} "
        f"WHERE {until} IS NULL OR {until} > %s) AS shown "
        f"WHERE per IN ('rule', 'queue') OR place <= {HOLDS}"
    )
    waiting_keys = (
        f"SELECT rule, {key}, COUNT(*) AS calls FROM {tables.name(using, 'CallQueue')} "
        f"WHERE {WAITING} AND ready AND {key} <> '' "
        f"AND rule IN (SELECT rule FROM {holds} WHERE per NOT IN ('rule', 'queue')) "
        f"GROUP BY rule, {key}"
    )
    of_keys = (
        f"SELECT h.rule, '', '', MAX(CASE WHEN k.calls > 0 THEN h.{until} END), '', '', COUNT(*), "
        f"SUM(k.calls), MAX(CASE WHEN k.calls > 0 AND h.{until} IS NULL THEN 1 ELSE 0 END) "
        f"FROM {holds} h "
        f"LEFT JOIN ({waiting_keys}) k ON k.rule = h.rule AND k.{key} = h.{value} "
        f"WHERE h.per NOT IN ('rule', 'queue') AND (h.{until} IS NULL OR h.{until} > %s) "
        "GROUP BY h.rule"
    )
    return f"{shown} UNION ALL {of_keys} ORDER BY 1, 9"


def _on_all(holds: Sequence[HoldLook], queues: Sequence[str], now: int) -> HoldLook | None:
    """What holds a whole rule: of several holds the one that ends last; or, where each of its
    queues is held, the one that is the first to let a queue go.
    """
    whole = [one for one in holds if one.per == "rule"]
    if whole:
        return max(whole, key=lambda one: one.seconds(now))
    by_queue: dict[str, HoldLook] = {}
    for one in holds:
        known = by_queue.get(one.value)
        if one.per == "queue" and (known is None or one.seconds(now) > known.seconds(now)):
            by_queue[one.value] = one
    if queues and all(queue in by_queue for queue in queues):
        return min((by_queue[queue] for queue in queues), key=lambda one: one.seconds(now))
    return None


# --- what waits


def _mean_costs(known: _Known) -> dict[tuple[str, str], float]:
    """By rule and unit, what a waiting call costs, from those that go next; empty where all limits
    are of calls.
    """
    units = {
        (name, one.budget.limit.unit)
        for name, listed in known.limits.items()
        if known.waits[name].ready
        for one in listed
    }
    others = sorted({name for name, unit in units if unit != "calls"})
    if not others:
        return {}
    most = max(10, min(SAMPLE, SAMPLED // len(others)))
    first = (
        f"SELECT %s, cost FROM (SELECT cost FROM {tables.name(known.using, 'CallQueue')} "
        f"WHERE {READY} ORDER BY priority DESC, due_at_dt, id LIMIT {most}) AS going_next"
    )
    costs: dict[str, list[Any]] = {}
    for name, cost in of_each(known.using, first, [(name, name) for name in others]):
        costs.setdefault(name, []).append(loaded(cost))
    return {
        (name, unit): 1.0
        if unit == "calls"
        else sum(cost_of(cost, unit) for cost in costs.get(name, ())) / len(costs.get(name, "-"))
        for name, unit in units
    }


def _sizes_of_parts(known: _Known) -> dict[tuple[str, str], Sizes]:
    """How the calls are spread over the values of limits that are per part of a key. One statement,
    where there are any: it reads an index entry for each call.
    """
    wanted = {
        (name, budget.limit.per)
        for name, waits in known.waits.items()
        if waits.ready
        for budget in known.book.budgets[name]
        if budget.limit.is_keyed and budget.limit.per != "key"
    }
    keys = of_keys(known.using, sorted({name for name, _ in wanted}))
    return {(name, per): _sizes(keys[name], per) for name, per in wanted}


def of_keys(using: str, names: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """The keys of each of these rules that have calls ready, and how many, most first. One
    statement, which reads an index entry for each call.
    """
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    if names:
        key = quoted(using, "key")
        sql = (
            f"SELECT rule, {key}, COUNT(*) FROM {tables.name(using, 'CallQueue')} "
            f"WHERE {WAITING} AND ready AND rule IN ({places(names)}) GROUP BY rule, {key}"
        )
        for rule, text, count in rows(using, sql, list(names)):
            found[rule].append((text, int(count)))
    for listed in found.values():
        listed.sort(key=lambda one: (-one[1], one[0]))
    return found


def _sizes(keys: Sequence[tuple[str, int]], per: str) -> list[tuple[int, int]]:
    """How many values of a `per` have so many calls, from the keys' counts."""
    values: dict[str, int] = {}
    for key, count in keys:
        value = key_part(key, per)
        values[value] = values.get(value, 0) + count
    sizes: dict[int, int] = {}
    for count in values.values():
        sizes[count] = sizes.get(count, 0) + 1
    return sorted(sizes.items())


def of_each(using: str, select: str, params: Sequence[Sequence[Any]]) -> list[Any]:
    """What a SELECT returns for each of these parameters, TOGETHER of them in a statement."""
    found: list[Any] = []
    for chunk in (params[at : at + TOGETHER] for at in range(0, len(params), TOGETHER)):
        sql = " UNION ALL ".join([select] * len(chunk))
        found += rows(using, sql, [value for one in chunk for value in one])
    return found
