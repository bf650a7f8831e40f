"""The account: what each budget of a group of rules is charged with. Releases go by it alone.

A release is charged in full until it is recorded or, by some limits (`_ages_once_told`), told to be
sent. Then it ages from the latest instant at which the provider can have counted it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from callqueue import states, tables
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
from callqueue.ledger import memo
from callqueue.ledger.memo import KnownRoom
from callqueue.ledger.memo import Memo as Memo
from callqueue.ledger.tallies import (
    Scope,
    Tallies,
    advance,
    apply_corrections,
    is_tallied,
    tallies_of,
)
from callqueue.ledger.tally_rows import condition_of_former
from callqueue.limits.budgets import Book, Budget, Former, cost_of
from callqueue.limits.kinds import Limit, Meter, Usage

LATELY = 2_000_000  # microseconds
# microseconds by which the ledger may be told of a call after it has aged away, and still see it
BELATED = 4_000_000
GLANCED = 1000  # open attempts of a rule that a glance counts at most
SAMPLE = 500  # open attempts that are read where no limit asks how many there are
SUMS = (
    "SUM(calls), COUNT(*), MIN(released_at), MIN(CASE WHEN started_at IS NULL THEN released_at END)"
)


@dataclass(frozen=True)
class Aged:
    """An attempt that ages: recorded, or known to be sent."""

    rule: str
    key: str
    queue: str
    cost: Any
    charged: Any  # at its release; None: it cost no more
    sent_at: Us | None
    finished_at: Us | None
    released_at: Us = Us(0)  # read where a budget has former rules

    def charges(self, limit: Limit) -> list[tuple[Us, int]]:
        """What it charges a limit, in up to two parts: (the instant since which it ages, units)."""
        cost, more, found = cost_of(self.cost, limit.unit), 0, []
        if self.charged is not None and self.finished_at is not None:
            more = max(0, cost - cost_of(self.charged, limit.unit))
            found = [(self.finished_at, more)] if more else []
        if cost > more:
            found.append((limit.aged_from(self.sent_at, self.finished_at), cost - more))
        return found


def _open_sums_sql(
    using: str,
    rules: Sequence[str],
    columns: Sequence[str],
    formers: Sequence[Former],
    is_sample: bool,
) -> tuple[str, list[Any]]:
    """Open attempts, or a sample, summed up by these columns and by whether they are known as sent.
    Rows begin with the place of the former rule, from 1; 0: a rule of the group.
    """
    names = ", ".join(quoted(using, column) for column in columns)
    is_told = "CASE WHEN sent_at IS NULL THEN 0 ELSE 1 END"
    is_open = f"{tables.name(using, 'CallAttempt')} WHERE finished_at IS NULL"
    source = f"{is_open} AND rule IN ({placeholders(rules)})"
    if is_sample:
        inner = f"SELECT {names}, calls, released_at, started_at, sent_at FROM {source}"
        source = f"({inner} LIMIT {SAMPLE}) AS sample"
    sums, grouped = f"{SUMS}, {is_told}, {names}", f"GROUP BY {is_told}, {names}"
    parts, params = [f"SELECT 0, {sums} FROM {source} {grouped}"], list[Any](rules)
    for place, former in enumerate(formers, start=1):
        where, of_former = condition_of_former(using, former)
        parts.append(f"SELECT {place}, {sums} FROM {is_open} AND {where} {grouped}")
        params += of_former
    return " UNION ALL ".join(parts), params


def aged_since(
    using: str,
    rules_by_since: Mapping[Us, Sequence[str]],
    *,
    told: int | None,
    by_units: bool,
    by_release: bool,
) -> Iterator[Aged]:
    """These rules' attempts that ended since, but for voided, or were sent since and are open. One
    statement: of one that ends meanwhile it sees the one or the other. `told`: by how many µs an
    open one may have been sent before that; None: no open one is read. `by_units`: costs in all
    units, not in calls. `by_release`: releases too.
    """
    cost_column, released = "cost" if by_units else "calls", ", released_at" if by_release else ""
    ends = f"charged, sent_at, finished_at{released}"
    columns = f"rule, {quoted(using, 'key')}, queue, {cost_column}, {ends}"
    parts, params, table = [], list[Any](), tables.name(using, "CallAttempt")
    for since, rules in rules_by_since.items():
        of_rules = f"SELECT {columns} FROM {table} WHERE rule IN ({placeholders(rules)})"
        parts.append(f"{of_rules} AND finished_at > %s AND outcome <> %s")
        params += [*rules, as_parameter(using, from_us(since)), states.VOIDED]
        if told is not None:
            parts.append(f"{of_rules} AND finished_at IS NULL AND sent_at > %s")
            params += [*rules, as_parameter(using, from_us(since - told))]
    found = rows(using, " UNION ALL ".join(parts), params) if parts else ()
    for rule, key, queue, cost, charged, sent_at, finished_at, *released_at in found:
        yield Aged(
            rule,
            key,
            queue,
            json_value(cost) if by_units else cost,
            None if charged is None else json_value(charged),
            None if sent_at is None else instant_us(sent_at),
            None if finished_at is None else instant_us(finished_at),
            *map(instant_us, released_at),
        )


def keys_of_lately_ended(using: str, rules: Sequence[str], now: Us) -> list[tuple[str, str]]:
    """The rules and keys of what ended, voided too, less than LATELY ago. One statement."""
    sql = (
        f"SELECT DISTINCT rule, {quoted(using, 'key')} FROM {tables.name(using, 'CallAttempt')} "
        f"WHERE rule IN ({placeholders(rules)}) AND finished_at > %s"
    )
    return rows(using, sql, [*rules, as_parameter(using, from_us(now - LATELY))])


@dataclass(frozen=True)
class Glance:
    open: int  # attempts, up to GLANCED
    untold: int  # those of them that nobody has told of, up to GLANCED
    newest_end: Us  # 0: none has ended


def glances(using: str, rules: Sequence[str]) -> dict[str, Glance]:
    """Of each of these rules, what shows whether an attempt has ended. One cheap statement."""
    table = tables.name(using, "CallAttempt")
    few = f"SELECT 1 FROM {table} WHERE finished_at IS NULL AND rule = %s"
    counts = ", ".join(
        f"(SELECT COUNT(*) FROM ({few}{condition} LIMIT {GLANCED}) o)"
        for condition in ("", " AND sent_at IS NULL")
    )
    newest = f"SELECT MAX(finished_at) FROM {table} WHERE finished_at IS NOT NULL AND rule = %s"
    each = f"SELECT %s, {counts}, ({newest})"
    found = union_all(using, [(each, [rule] * 4) for rule in rules])
    return {
        rule: Glance(int(is_open), int(untold), Us(0) if ended is None else instant_us(ended))
        for rule, is_open, untold, ended in found
    }


@dataclass
class Account:
    """The charges on the budgets of some rules at `now`, in ledger time."""

    using: str
    book: Book
    rules: tuple[str, ...]
    now: Us
    until: Us  # up to which a pass releases
    memo: Memo = field(default_factory=Memo)
    is_whole: bool = False  # tallied budgets are read as far as those who only look want to know
    moved: int = 0  # by how much ledger time is behind the wall

    def __post_init__(self) -> None:
        self.is_counted = True  # else it goes by known room, and knows no more open than was noted
        self.is_cut = False  # more attempts may be open than were read
        self.open_count = self.untold_count = 0
        self.open_by_queue: dict[str, int] = defaultdict(int)
        self.open_by_rule: dict[str, int] = defaultdict(int)
        self.unbegun_since: dict[str, Us] = {}  # by rule, the oldest release that nobody has begun
        self.tallies: dict[str, Tallies] = {}  # by budget
        self.open: dict[Scope, int] = defaultdict(int)  # the cost that does not age yet
        self.aged: dict[Scope, list[tuple[Us, int]]] = defaultdict(list)
        self._meters: dict[Scope, Meter] = {}
        self._keys_read: set[str] = set()
        self._room: KnownRoom | None = None  # that the pass goes by, or has noted
        self._charged: dict[str, int] = defaultdict(int)  # by budget, what this pass releases
        self._released: dict[str, int] = defaultdict(int)  # by rule, how many
        self._oldest_open = self.now  # when the oldest open attempt was released, if any

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return self.book.group_budgets(self.rules)

    def meter(self, budget: Budget, value: str = "") -> Meter:
        """The one meter of this scope, from which the plan takes; of tallied keys, once read."""
        scope = (budget.id, value)
        if scope not in self._meters:
            self._meters[scope] = self._new_meter(budget, value)
        return self._meters[scope]

    def read_keys(self, keys: Iterable[str]) -> None:
        """Read what these keys are charged with in tallied budgets, each key once."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._keys_read]
        self._keys_read.update(wanted)
        for budget in self.budgets if wanted else ():
            if budget.limit.is_keyed and is_tallied(budget.limit):
                self.read_values(
                    budget, list(dict.fromkeys(budget.value_of(key, "") for key in wanted))
                )

    def charge(self, rule: str, key: str, queue: str, cost: Any) -> None:
        """Charge the tallies, and known room, with what a plan has taken and the pass writes."""
        self._released[rule] += 1
        for budget in self.book.budgets[rule]:
            of_unit = budget.charge_of(cost)
            self._charged[budget.id] += of_unit
            if (tallies := self.tallies.get(budget.id)) is not None:
                value = budget.value_of(key, queue)
                tallies.tally_of(value).planned = 0
                tallies.change(value, of_unit)

    def usage(self, budget: Budget, value: str = "") -> Usage:
        """What an untallied budget is charged with, for a value; may keep its level in the memo."""
        scope, limit = (budget.id, value), budget.limit
        since = limit.horizon(self.now)
        # What was answered only now may have aged away long ago.
        aged = sorted(charge for charge in self.aged.get(scope, ()) if charge[0] >= since)
        may_owe = self.book.may_owe(budget)
        usage = Usage(self.open.get(scope, 0), aged, since, may_owe=may_owe)
        if limit.keeps_level and not limit.is_keyed:
            return memo.usage_since_kept_level(
                self.memo, budget, value, usage, self._oldest_open, self.now
            )
        return usage

    def answered_scopes(self) -> list[Scope]:
        """Untallied scopes per key where attempts age or lately ended. One statement at most."""
        keyed = [b for b in self.budgets if b.limit.is_keyed and b.id not in self.tallies]
        ids = {budget.id for budget in keyed}
        found = {scope for scope in self.aged if scope[0] in ids}
        in_flight = [b for b in keyed if b.limit.counts_in_flight]
        pairs = keys_of_lately_ended(self.using, self.rules, self.now) if in_flight else ()
        for rule, key in pairs:
            found |= {(b.id, b.value_of(key, "")) for b in in_flight if rule in b.rules}
        return sorted(found)

    def read(self, *, has_corrections: bool = False) -> None:
        """Read tallies, corrected if asked (a write), what is open, what ages in other budgets."""
        self.read_tallies(has_corrections)
        self._read_open()
        self._read_aged()

    # --- known room

    def try_known_room(self, laid: Mapping[str, int]) -> bool:
        """Go by known room, with tallies read; False: not valid. `laid`: holds laid, by rule."""
        budgets = memo.known_room_budgets(self.book, self.rules)
        known = KnownRoom.load(self.memo.room)
        if budgets is None or known is None:
            return False
        if not known.is_valid_for(budgets, self.now, self.moved, laid):
            return False
        self.is_counted, self._room = False, known
        self.read_tallies(has_corrections=False)
        self.open_by_rule.update(known.open)
        return True

    def note_room(self, laid: Mapping[str, int]) -> None:
        """Note what is free before a plan, where it may be known. `laid`: holds laid, by rule."""
        budgets = memo.known_room_budgets(self.book, self.rules)
        if budgets is not None and not self.is_cut:
            free = {one.id: self.meter(one).free for one in budgets}
            is_open = {rule: self.open_by_rule[rule] for rule in self.rules}
            print_ = memo.budgets_fingerprint(tuple(budgets))
            self._room = KnownRoom(self.now, self.moved, print_, laid, free, is_open)

    def known_room_left(self) -> dict[str, Any]:
        return self._room.without(self._charged, self._released).dump() if self._room else {}

    # --- tallied budgets

    def read_tallies(self, has_corrections: bool) -> None:
        """Load or recount tallies; correct if asked; advance those of keys, all if `is_whole`."""
        kept = [(b, self.memo.tallies.get(b.id)) for b in self.budgets if is_tallied(b.limit)]
        found = tallies_of(self.using, kept, self.now, self.until)
        self.tallies = {one.budget.id: one for one in found}
        if has_corrections:
            apply_corrections(self.using, self.rules, self.tallies.values())
        read = self.tallies.values()
        advance(self.using, (one for one in read if self.is_whole or one.limit.is_keyed))

    def read_values(self, budget: Budget, values: Sequence[str]) -> None:
        self.tallies[budget.id].load(values)

    def _new_meter(self, budget: Budget, value: str) -> Meter:
        """A meter over what is charged; one of a tally shares what others over it have taken."""
        if budget.id in self.tallies:
            return self.tallies[budget.id].meter(value)
        if not self.is_counted and self._room:
            return budget.limit.meter_with(self._room.free[budget.id], self.now)
        return budget.limit.meter(self.usage(budget, value), self.now)

    # --- open attempts

    def _read_open(self) -> None:
        """Sum up what is open, by the columns that budgets tell apart; a sample where none asks."""
        budgets = [b for b in self.budgets if self.is_whole or b.id not in self.tallies]
        formers = sorted({former for budget in budgets for former in budget.former})
        columns, by_rule = self._columns_told_apart(budgets), _budgets_by_rule(budgets)
        sql, params = _open_sums_sql(self.using, self.rules, columns, formers, not budgets)
        for place, calls, count, since, unbegun, is_told, *values in rows(self.using, sql, params):
            row = dict(zip(columns, values, strict=True))
            rule, key, queue = row["rule"], row.get("key", ""), row.get("queue", "")
            cost = json_value(row["cost"]) if "cost" in row else None
            self._oldest_open = min(self._oldest_open, instant_us(since))
            for budget in by_rule[rule]:
                is_charged = (
                    rule in budget.rules if not place else formers[place - 1] in budget.former
                )
                if is_charged and not (is_told and _ages_once_told(budget)):
                    scope = budget.id, budget.value_of(key, queue)
                    each = None if cost is None else budget.charge_of(cost)
                    self.open[scope] += int(calls or 0) if each is None else each * count
            if not place:
                self._count_open(rule, queue, count, 0 if is_told else count, unbegun)
        self.is_cut = not budgets and self.open_count >= SAMPLE

    def _columns_told_apart(self, budgets: Sequence[Budget]) -> list[str]:
        queues = any(len(self.book.rules[rule].queue_names) > 1 for rule in self.rules)
        wanted = {
            "rule": True,
            "queue": queues or any(b.limit.is_per_queue for b in budgets),
            "key": any(b.limit.is_keyed for b in budgets),
            "cost": any(b.limit.unit != "calls" for b in budgets),
        }
        return [column for column, is_wanted in wanted.items() if is_wanted]

    def _count_open(self, rule: str, queue: str, count: int, untold: int, unbegun: Any) -> None:
        self.open_count += count
        self.untold_count += untold
        self.open_by_queue[queue] += count
        self.open_by_rule[rule] += count
        if unbegun is not None:  # the oldest release of these that nobody has begun
            since = self.unbegun_since.get(rule, self.now)
            self.unbegun_since[rule] = min(since, instant_us(unbegun))

    # --- attempts that age

    def _read_aged(self) -> None:
        """Charge what ages to the budgets that are neither tallied nor of what is in flight."""
        fine = [b for b in self.budgets if not is_tallied(b.limit) and not b.limit.counts_in_flight]
        # Keys that wait are woken by what was told of, even if it has aged away by then.
        told = [
            b.limit.jitter_us + (BELATED if b.limit.is_keyed else 0)
            for b in fine
            if _ages_once_told(b)
        ]
        by_rule = _budgets_by_rule(fine)
        for found in aged_since(
            self.using,
            self._rules_by_since(fine),
            told=max(told, default=None),
            by_units=any(b.limit.unit != "calls" for b in fine),
            by_release=any(b.former for b in fine),
        ):
            self._charge_aged(found, by_rule[found.rule])

    def _rules_by_since(self, budgets: Sequence[Budget]) -> dict[Us, list[str]]:
        """Rules by the instant since which their attempts count, each by its own budgets only."""
        since: dict[str, Us] = {}
        for budget in budgets:
            for rule in budget.charging_rules:
                since[rule] = min(self._needed_since(budget), since.get(rule, self.now))
        found: dict[Us, list[str]] = {}
        for rule, instant in sorted(since.items()):
            found.setdefault(instant, []).append(rule)
        return found

    def _needed_since(self, budget: Budget) -> Us:
        # a kept level needs only what is newer
        limit = budget.limit
        since = limit.horizon(self.now)
        if not limit.keeps_level or not limit.is_per_rule:
            return since
        kept = memo.kept_level(self.memo, budget, "", since, self.now)
        return kept.at if kept else since

    def _charge_aged(self, attempt: Aged, budgets: Sequence[Budget]) -> None:
        for budget in budgets:
            if attempt.finished_at is None and not _ages_once_told(budget):
                continue
            if not budget.counts(attempt.rule, attempt.released_at):
                continue
            if parts := attempt.charges(budget.limit):
                self.aged[budget.id, budget.value_of(attempt.key, attempt.queue)] += parts


def read(
    using: str,
    book: Book,
    rules: Sequence[str],
    now: Us,
    memo: Memo | None = None,
    *,
    is_whole: bool = False,
) -> Account:
    """The account of a group of rules at `now`, in as many statements whatever the backlog."""
    account = Account(using, book, tuple(rules), now, now, memo or Memo(), is_whole)
    account.read()
    return account


def save(account: Account) -> None:
    """Write the tallies; the memo gets what the next pass wants to know. Under the rules' lock."""
    for one in account.tallies.values():
        one.save()
    account.memo.tallies = {name: one.as_kept() for name, one in account.tallies.items()}
    account.memo.room = account.known_room_left()
    # what this pass released is missing from others' levels
    memo.forget_other_levels(account.memo, {budget.id for budget in account.budgets})


def _budgets_by_rule(budgets: Iterable[Budget]) -> dict[str, list[Budget]]:
    found: dict[str, list[Budget]] = defaultdict(list)
    for budget in budgets:
        for rule in set(budget.charging_rules):  # former ones, too
            found[rule].append(budget)
    return found


def _ages_once_told(budget: Budget) -> bool:
    return budget.limit.ages_unanswered and not is_tallied(budget.limit)
