"""Reads where every rule stands at one moment: some thirteen statements, whatever there is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.db.models import Q

from callqueue import clocks, conf, database, tables
from callqueue.clocks import Us
from callqueue.database import (
    as_parameter,
    from_us,
    instant_us,
    json_value,
    placeholders,
    quoted,
    rows,
    union_all,
)
from callqueue.history import sums
from callqueue.ledger import ledger_time, settings
from callqueue.ledger.ready_calls import READY, WAITING
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.budgets import Book, cost_of, scopes_of
from callqueue.limits.in_force import Difference
from callqueue.limits.kinds import SECOND
from callqueue.look import alive, attempts, estimate, limits, waiting
from callqueue.look.attempts import Attempts, InFlight, Pace
from callqueue.look.estimate import Gate, Sizes
from callqueue.look.limits import LimitLook
from callqueue.look.model import FOREVER, HoldLook, Look, RuleLook, explains_pace
from callqueue.look.waiting import Waiting

NOTHING: Mapping[str, int] = {}
HOLDS = 5  # on keys that a rule shows of each `per`
SAMPLE, SAMPLED = 100, 4000  # waiting calls whose mean cost is taken: of a rule, and of all


def look(
    using: str,
    *,
    rules: Sequence[str] | None = None,
    rates: Mapping[str, str] | None = None,
    key: str | None = None,
    more: Mapping[str, int] = NOTHING,
) -> Look:
    """Where these rules stand, or all, as of one moment.

    `rates`: as if these limits had other rates (id in the settings -> rate), with what is in force
    in `before`. `key`, not beside `rates`: holds and limits per key as they are for it; the pace of
    the newest calls where none was answered lately. `more`: by rule, calls to add, of new keys.
    """
    with database.one_snapshot(using):
        now, moved, summed_until, version, signs = _read_moment(using)
        book = settings.book_in_force(using, known_version=version).moved_by(moved)
        names = tuple(conf.current().rules if rules is None else rules)
        known = _Known.read(using, book, names, now, moved, key, signs, more)
        differences: Sequence[Difference] = ()
        if len(digests := {one.digest for one in known.signs if one.is_alive and one.digest}) > 1:
            differences = settings.disagreements(using, digests)
        seen = Look(
            now=now,
            moved=moved,
            book=book,
            rules=[_rule_look(known, name) for name in names],
            signs=known.signs,
            workers=known.attempts.workers,
            stalls=known.attempts.stalls,
            summed_until=summed_until,
            differences=differences,
        )
        return _with_rates(known, seen, rates) if rates else seen


def _with_rates(known: _Known, seen: Look, rates: Mapping[str, str]) -> Look:
    # Whether workers are slow is judged by the limits as they were.
    then = known.with_limits_read_by(seen.book.with_rates(rates))
    found = [replace(_rule_look(then, one.name), is_limited=one.is_limited) for one in seen.rules]
    return replace(seen, book=then.book, rules=found, before=seen)


def _rule_look(known: _Known, name: str) -> RuleLook:
    listed = known.limits[name]
    gates = [_gate_of_limit(known, name, one) for one in listed]
    on_keys = known.keys_held.get(name, _KeysHeld())
    return RuleLook(
        name=name,
        rule=known.book.rules[name],
        now=known.now,
        moved=known.moved,
        is_dispensing=any(one.is_alive for one in known.signs),
        has_fallen_silent=alive.has_fallen_silent(known.signs),
        waits=known.waits[name],
        flight=known.attempts.flights.get(name, InFlight()),
        pace=known.attempts.paces[name],
        incoming=known.incoming.get(name, 0.0),
        holds=known.held.get(name, ()),
        keys_held=on_keys.count,
        kept_calls=on_keys.calls,
        kept_s=on_keys.seconds,
        limits=listed,
        waited_for=known.binding.get(name, ""),
        gates=gates,
        is_limited=any(map(explains_pace, gates)),
        stalls=[one for one in known.attempts.stalls if name in one.rules],
        recent=known.recent.get(name) or sums.Recent(),
    )


def _read_moment(using: str) -> tuple[Us, int, Us, int, list[alive.Sign]]:
    """Now; `moved`; until when ends are summed (0: never); the settings' version; signs of life."""
    sql = (
        f"SELECT {ledger_time.reading_sql(using)}, "
        f"(SELECT MAX(until) FROM {tables.name(using, 'Summed')}), {settings.version_sql(using)}, "
        "name, seen_at, kind, digest, broker "
        f"FROM (SELECT 1 AS here) AS moment LEFT JOIN {tables.name(using, 'DispenserState')} "
        "ON here = 1 ORDER BY seen_at DESC"
    )
    before, found = clocks.monotonic(), rows(using, sql)
    *shown, until, version = found[0][: len(ledger_time.READING_COLUMNS) + 2]
    reading = ledger_time.reading_of(using, before, *shown)
    signs = [
        alive.Sign(name, from_us(instant_us(at) + reading.moved), kind, digest, broker)
        for *_, name, at, kind, digest, broker in found
        if name is not None
    ]
    judged = alive.with_is_alive(signs, from_us(reading.wall))
    return reading.at, reading.moved, Us(until or 0), int(version), judged


@dataclass(frozen=True)
class _Known:
    """What one look has read, in its snapshot. By rule: those asked for and those that share limits
    with them; holds and flights of all. `moved` in microseconds; `incoming`: calls a second.
    """

    using: str
    book: Book
    now: Us
    moved: int
    signs: Sequence[alive.Sign]
    attempts: Attempts
    waits: Mapping[str, Waiting]
    incoming: Mapping[str, float]
    limits: Mapping[str, Sequence[LimitLook]]
    binding: Mapping[str, str] = field(default_factory=dict)  # id of the budget it waited for
    costs: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by rule and unit
    sizes: Mapping[tuple[str, str], Sizes] = field(default_factory=dict)  # by rule and `per`
    held: Mapping[str, Sequence[HoldLook]] = field(default_factory=dict)
    keys_held: Mapping[str, _KeysHeld] = field(default_factory=dict)
    recent: Mapping[str, sums.Recent] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        using: str,
        book: Book,
        names: Sequence[str],
        now: Us,
        moved: int,
        key: str | None,
        signs: Sequence[alive.Sign],
        more: Mapping[str, int],
    ) -> _Known:
        """`key`, `more` as in `look`: limits are read with the calls that `more` adds."""
        # rules that share a limit wait for each other
        group = sorted({one for name in names for one in book.groups[name]})
        shown = [*names, *(n for n in group if n not in names and n in book.settings.rules)]
        found = attempts.read(using, shown, now)
        if key is not None:
            found = replace(found, paces=_read_newest_paces(using, found.paces, names))
        waits, incoming = waiting.read(using, shown, now, moved)
        for name, count in more.items():
            waits[name].ready += count
        backlog = {name: one.calls for name, one in waits.items()}
        listed, binding = limits.read(using, book, shown, now, moved, backlog, key=key)
        known = cls(using, book, now, moved, signs, found, waits, incoming, listed, binding)
        held, keys_held = _read_holds(using, now, moved, key)
        return replace(
            known,
            costs=_read_mean_costs(known),
            sizes=_read_sizes(known, more),
            held=held,
            keys_held=keys_held,
            recent=sums.read_recent(using, shown, now // SECOND),
        )

    def with_limits_read_by(self, book: Book) -> _Known:
        backlog = {name: one.calls for name, one in self.waits.items()}
        listed, _ = limits.read(self.using, book, list(self.waits), self.now, self.moved, backlog)
        return replace(self, book=book, limits=listed)


def _read_newest_paces(
    using: str, paces: Mapping[str, Pace], names: Sequence[str]
) -> Mapping[str, Pace]:
    """`paces`, but of rules with no answer lately those of their newest calls: a statement each."""
    unknown = [name for name in names if not paces[name].latency]
    return {**paces, **{name: attempts.read_newest_pace(using, name) for name in unknown}}


def _gate_of_limit(known: _Known, name: str, one: LimitLook) -> Gate:
    budget, rule = one.budget, known.book.rules[name]
    limit, cost = budget.limit, known.costs.get((name, budget.limit.unit), 1.0)
    gate = Gate(limit, one.meter, cost=cost, charged_s=_seconds_charged(known, name, one))
    if limit.is_keyed:
        return replace(gate, sizes=known.sizes.get((name, limit.per), [(1, 1)]))
    others = [other for other in budget.rules if other in known.waits and other != name]
    higher = [other for other in others if _priority(known, other) > rule.priority]
    equal = [other for other in others if _priority(known, other) == rule.priority]
    return replace(
        gate,
        lanes=len(rule.queue_names) if limit.is_per_queue else 1,
        emptiest=one.emptiest if limit.is_per_queue else None,
        before=sum(known.waits[other].ready for other in higher),
        beside=sum(known.waits[other].ready for other in equal),
    )


def _priority(known: _Known, name: str) -> int:
    return known.book.rules[name].priority


def _seconds_charged(known: _Known, name: str, one: LimitLook) -> float:
    limit, pace = one.budget.limit, known.attempts.paces[name]
    is_told = pace.is_stamped and not is_tallied(limit)
    return estimate.seconds_charged(limit, pace.latency, late=pace.late, is_told=is_told)


# --- holds


@dataclass(frozen=True)
class _KeysHeld:
    """Holds on keys of a rule: how many, how many calls they keep back, for how many seconds."""

    count: int = 0
    calls: int = 0
    seconds: float = 0.0


def _read_holds(
    using: str, now: Us, moved: int, key: str | None
) -> tuple[dict[str, list[HoldLook]], dict[str, _KeysHeld]]:
    """Holds in force by rule, of those on keys `key`'s and a few; and what all on keys come to."""
    held: dict[str, list[HoldLook]] = {}
    on_keys: dict[str, _KeysHeld] = {}
    at, values = as_parameter(using, from_us(now)), sorted({v for _, v in scopes_of(key or "")})
    found = rows(using, _shown_holds_sql(using, values), [at, *values])
    for rule, per, value, until, reason, source in found:
        instant = None if until is None else from_us(instant_us(until) + moved)
        held.setdefault(rule, []).append(HoldLook(rule, per, value, instant, reason, source))
    if pers := sorted({one.per for listed in held.values() for one in listed if one.is_on_keys}):
        sql, params = _holds_on_keys_sql(using, pers)
        for rule, count, calls, until, is_endless in rows(using, sql, [*params, at]):
            ends = now if until is None else instant_us(until)
            seconds = FOREVER if is_endless else (ends - now) / SECOND
            on_keys[rule] = _KeysHeld(int(count), int(calls or 0), seconds)
    return held, on_keys


def _shown_holds_sql(using: str, values: Sequence[str]) -> str:
    """SQL (params: now, `values`) for holds on rules, queues, these values; HOLDS of each `per`."""
    value, until = quoted(using, "value"), quoted(using, "until")
    place = (
        f"ROW_NUMBER() OVER (PARTITION BY rule, per ORDER BY "
        f"CASE WHEN {until} IS NULL THEN 0 ELSE 1 END, {until} DESC, id)"
    )
    asked = f" OR {value} IN ({placeholders(values)})" if values else ""
    return (
        f"SELECT rule, per, {value}, {until}, reason, source FROM ("
        f"SELECT rule, per, {value}, {until}, reason, source, {place} AS place "
        f"FROM {tables.name(using, 'Hold')} WHERE {until} IS NULL OR {until} > %s) AS shown "
        f"WHERE per IN ('rule', 'queue') OR place <= {HOLDS}{asked} ORDER BY rule, place"
    )


def _holds_on_keys_sql(using: str, pers: Sequence[str]) -> tuple[str, list[Any]]:
    """SQL, params but the last (now): by rule, holds on keys, calls kept, last end, any endless."""
    holds = tables.name(using, "Hold")
    value, until, key = (quoted(using, name) for name in ("value", "until", "key"))
    part = _key_part_sql(using)
    scopes = [f"SELECT rule, 'key' AS per, {key} AS {value}, calls FROM waiting_keys"]
    scopes += [f"SELECT rule, %s, {part}, calls FROM waiting_keys" for _ in pers]
    # the ends are of those holds alone that keep calls back
    sql = (
        f"WITH waiting_keys AS (SELECT rule, {key}, COUNT(*) AS calls "
        f"FROM {tables.name(using, 'CallQueue')} WHERE {WAITING} AND ready AND {key} <> '' "
        f"AND rule IN (SELECT rule FROM {holds} WHERE per NOT IN ('rule', 'queue')) "
        f"GROUP BY rule, {key}) "
        f"SELECT h.rule, COUNT(DISTINCT h.id), SUM(k.calls), "
        f"MAX(CASE WHEN k.calls > 0 THEN h.{until} END), "
        f"MAX(CASE WHEN k.calls > 0 AND h.{until} IS NULL THEN 1 ELSE 0 END) "
        f"FROM {holds} h LEFT JOIN ({' UNION ALL '.join(scopes)}) k "
        f"ON k.rule = h.rule AND k.per = h.per AND k.{value} = h.{value} "
        f"WHERE h.per NOT IN ('rule', 'queue') AND (h.{until} IS NULL OR h.{until} > %s) "
        "GROUP BY h.rule"
    )
    return sql, [param for per in pers for param in (per, *_key_part_params(per))]


def _key_part_sql(using: str) -> str:
    """SQL for the value that a key's text has for a name, of `_key_part_params`; "" if none."""
    key, position = quoted(using, "key"), database.dialect(using).position
    begins = f"{position}({key}, %s)"
    rest = f"substr({key}, {begins} + %s)"
    return (
        f"CASE WHEN substr({key}, 1, 1) <> '{{' OR {begins} = 0 THEN '' "
        f"ELSE substr({rest}, 1, {position}({rest}, '\"') - 1) END"
    )


def _key_part_params(per: str) -> list[Any]:
    mark = f'{json.dumps(per, ensure_ascii=False)}:"'
    return [mark, mark, len(mark), mark, len(mark)]


# --- what waits


def _read_mean_costs(known: _Known) -> dict[tuple[str, str], float]:
    """The mean cost of some next calls, by rule and unit; empty where all limits are of calls."""
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
    for name, cost in union_all(known.using, [(first, (name, name)) for name in others]):
        costs.setdefault(name, []).append(json_value(cost))
    return {
        (name, unit): 1.0
        if unit == "calls"
        else sum(cost_of(cost, unit) for cost in costs[name]) / len(costs[name])
        for name, unit in units
        if unit == "calls" or name in costs
    }


def _read_sizes(known: _Known, more: Mapping[str, int]) -> dict[tuple[str, str], Sizes]:
    """By rule and `per`, how ready calls, and `more`, are spread over its values. Few rows."""
    wanted = {
        (name, budget.limit.per)
        for name, waits in known.waits.items()
        if waits.ready
        for budget in known.book.budgets[name]
        if budget.limit.is_keyed
    }
    selects = []
    for name, per in sorted(wanted):
        is_whole = per == "key"
        value = quoted(known.using, "key") if is_whole else _key_part_sql(known.using)
        spread = (
            "SELECT %s, %s, calls, COUNT(*) FROM (SELECT part, COUNT(*) AS calls FROM ("
            f"SELECT {value} AS part FROM {tables.name(known.using, 'CallQueue')} "
            f"WHERE {READY}) AS parts GROUP BY part) AS spread GROUP BY calls"
        )
        params = () if is_whole else _key_part_params(per)
        selects.append((spread, (name, per, *params, name)))
    found = {(name, per): [(1, more[name])] for name, per in wanted if name in more}
    for name, per, calls, values in union_all(known.using, selects):
        found.setdefault((name, per), []).append((int(calls), int(values)))
    return {scope: sorted(sizes) for scope, sizes in found.items()}


def read_largest_keys(
    using: str, rule: str, most: int, now: Us
) -> tuple[list[tuple[str, int, bool]], int]:
    """The keys with most calls ready, how many, whether held; and how many keys have any ready."""
    key = quoted(using, "key")
    of_keys = (
        f"SELECT {key}, COUNT(*) AS calls FROM {tables.name(using, 'CallQueue')} "
        f"WHERE {READY} AND {key} <> '' GROUP BY {key}"
    )
    sql = (
        f"SELECT {key}, calls, COUNT(*) OVER () AS keys_count FROM ({of_keys}) AS of_keys "
        f"ORDER BY calls DESC, {key} LIMIT {most}"
    )
    found = rows(using, sql, [rule])
    values = sorted({value for text, *_ in found for _, value in scopes_of(text)})
    held = tables.holds(using).filter(rule=rule, value__in=values)
    held = held.filter(Q(until__isnull=True) | Q(until__gt=from_us(now)))
    scopes = set(held.values_list("per", "value"))
    listed = [(key, int(calls), not scopes.isdisjoint(scopes_of(key))) for key, calls, _ in found]
    return listed, int(found[0][2]) if found else 0
