"""The account: what every budget of a group of rules is charged with now, from the attempts and
their tallies. The only place that counts for releases.

An attempt is charged in full from its release until it is known to have been counted: until its
answer, or until a worker has told when it was sent. Then it ages from the latest instant at which
the provider can have counted it; a voided one never reached the wire and is not charged. `Account`
gives the meters that a pass plans with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from callqueue.ledger import charges, levels
from callqueue.ledger.charges import Aged, Open
from callqueue.ledger.charges import open_counts as open_counts
from callqueue.ledger.memo import Memo as Memo
from callqueue.ledger.tallies import (
    Scope,
    Tallies,
    advance,
    is_tallied,
    take_corrections,
    tallies_of,
)
from callqueue.limits.budgets import Book, Budget
from callqueue.limits.kinds import Meter, Usage


@dataclass
class Account:
    """The charges on the budgets of some rules at `now` (microseconds on the database's clock).

    `until`: the instant up to which a pass releases. `memo`: what earlier passes remembered.
    `open_*`: the open attempts; `untold_count`: those of them that the ledger knows nothing of yet;
    `unbegun_since`: by rule, when the oldest that no worker has begun
    was released. `tallies`: by budget.
    """

    using: str
    book: Book
    rules: tuple[str, ...]
    now: int
    until: int
    memo: Memo = field(default_factory=Memo)

    def __post_init__(self) -> None:
        self.open_count = self.untold_count = 0
        self.open_by_queue: dict[str, int] = defaultdict(int)
        self.open_by_rule: dict[str, int] = defaultdict(int)
        self.unbegun_since: dict[str, int] = {}
        self.tallies: dict[str, Tallies] = {}
        self.open: dict[Scope, int] = defaultdict(int)
        self.aged: dict[Scope, list[tuple[int, int]]] = defaultdict(list)
        self._meters: dict[Scope, Meter] = {}
        self._keys_read: set[str] = set()
        self._oldest_open = self.now

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Every budget of the rules."""
        return self.book.group_budgets(self.rules)

    def meter(self, budget: Budget, value: str = "") -> Meter:
        """The meter of one budget for one value of its `per`."""
        scope = (budget.id, value)
        if scope not in self._meters:
            self._meters[scope] = self.new_meter(budget, value)
        return self._meters[scope]

    def read_keys(self, keys: Iterable[str]) -> None:
        """Read what these keys are charged with in tallied budgets; each key is read once."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._keys_read]
        self._keys_read.update(wanted)
        for budget in self.budgets if wanted else ():
            if budget.limit.is_keyed and is_tallied(budget.limit):
                self.read_values(
                    budget, list(dict.fromkeys(budget.value_of(key, "") for key in wanted))
                )

    def usage(self, budget: Budget, value: str = "") -> Usage:
        """What a budget that is not tallied is charged with, for one value of its `per`."""
        scope, limit = (budget.id, value), budget.limit
        since = limit.horizon(self.now)
        # What was answered only now may have aged away long ago.
        aged = sorted(charge for charge in self.aged.get(scope, ()) if charge[0] >= since)
        may_owe = bool(budget.former or any(self.book.rules[one].settle for one in budget.rules))
        usage = Usage(self.open.get(scope, 0), aged, since, may_owe=may_owe)
        if limit.keeps_level and not limit.is_keyed:
            return levels.brought_up(self.memo, budget, value, usage, self._oldest_open, self.now)
        return usage

    def answered(self) -> list[Scope]:
        """The scopes of untallied budgets per key in which calls were answered lately."""
        keyed = [b for b in self.budgets if b.limit.is_keyed and b.id not in self.tallies]
        ids = {budget.id for budget in keyed}
        found = {scope for scope in self.aged if scope[0] in ids}
        in_flight = [b for b in keyed if b.limit.counts_in_flight]
        pairs = charges.answered_lately(self.using, self.rules, self.now) if in_flight else ()
        for rule, key in pairs:
            found |= {(b.id, b.value_of(key, "")) for b in in_flight if rule in b.rules}
        return sorted(found)

    def read(self, *, has_corrections: bool = False) -> None:
        """Read the charges: changes of tallies, all that is open, what ages in other budgets."""
        self.read_tallies(has_corrections)
        self._read_open()
        self._read_aged()

    # --- tallied budgets

    def read_tallies(self, has_corrections: bool) -> None:
        """Bring the tallies up to date: recounts first, then corrections, then what has left."""
        for budget in self.budgets:
            if is_tallied(budget.limit):
                kept = self.memo.tallies.get(budget.id)
                self.tallies[budget.id] = tallies_of(self.using, budget, self.now, kept, self.until)
        if has_corrections:
            take_corrections(self.using, self.rules, self.tallies.values())
        advance(self.using, (one for one in self.tallies.values() if one.limit.is_keyed))

    def read_values(self, budget: Budget, values: Sequence[str]) -> None:
        """Read what a tallied budget is charged with for these values."""
        self.tallies[budget.id].load(values)

    def new_meter(self, budget: Budget, value: str) -> Meter:
        """A meter over what is charged before this account releases anything."""
        if budget.id in self.tallies:
            return self.tallies[budget.id].meter(value)
        return budget.limit.meter(self.usage(budget, value), self.now)

    # --- open attempts

    def _read_open(self) -> None:
        """Sum the open attempts over no more columns than the budgets tell apart; a sample of them
        where no budget asks.
        """
        budgets = [b for b in self.budgets if b.id not in self.tallies]
        formers = sorted({former for budget in budgets for former in budget.former}, key=str)
        columns, by_rule = self._columns_told_apart(budgets), _by_rule(budgets)
        for found in charges.open_sums(
            self.using, self.rules, columns, formers, samples=not budgets
        ):
            self._oldest_open = min(self._oldest_open, found.released_at)
            self._charge_open(found, by_rule[found.rule])
            if found.former is None:
                self._count_open(found)

    def _columns_told_apart(self, budgets: Sequence[Budget]) -> list[str]:
        queues = any(len(self.book.rules[rule].queue_names) > 1 for rule in self.rules)
        wanted = {
            "rule": True,
            "queue": queues or any(b.limit.is_per_queue for b in budgets),
            "key": any(b.limit.is_keyed for b in budgets),
            "cost": any(b.limit.unit != "calls" for b in budgets),
        }
        return [column for column, is_wanted in wanted.items() if is_wanted]

    def _charge_open(self, found: Open, budgets: Sequence[Budget]) -> None:
        for budget in budgets:
            if found.is_told and _ages_unanswered(budget):
                continue
            if (
                found.rule in budget.rules
                if found.former is None
                else found.former in budget.former
            ):
                cost = found.calls
                if found.cost is not None:
                    cost = budget.charge_of(found.cost) * found.count
                self.open[budget.id, budget.value_of(found.key, found.queue)] += cost

    def _count_open(self, found: Open) -> None:
        self.open_count += found.count
        self.untold_count += 0 if found.is_told else found.count
        self.open_by_queue[found.queue] += found.count
        self.open_by_rule[found.rule] += found.count
        if found.unbegun_since is not None:
            since = self.unbegun_since.get(found.rule, self.now)
            self.unbegun_since[found.rule] = min(since, found.unbegun_since)

    # --- attempts that age

    def _read_aged(self) -> None:
        """Read the attempts that age, those that any budget that is not tallied may still count."""
        fine = [b for b in self.budgets if not is_tallied(b.limit) and not b.limit.counts_in_flight]
        # Keys that wait are woken by what was told of, even if it has aged away by then.
        told = [
            b.limit.jitter_us + (charges.BELATED if b.limit.is_keyed else 0)
            for b in fine
            if _ages_unanswered(b)
        ]
        by_rule = _by_rule(fine)
        for found in charges.aged_since(
            self.using,
            self._rules_by_since(fine),
            told=max(told, default=None),
            by_units=any(b.limit.unit != "calls" for b in fine),
            by_release=any(b.former for b in fine),
        ):
            self._charge_aged(found, by_rule[found.rule])

    def _rules_by_since(self, budgets: Sequence[Budget]) -> dict[int, list[str]]:
        """Since when the attempts of which rules are wanted: no rule's are read for the sake of a
        longer window of another's.
        """
        since: dict[str, int] = {}
        for budget in budgets:
            for rule in (*budget.rules, *(name for name, _ in budget.former)):
                since[rule] = min(self._since(budget), since.get(rule, self.now))
        found: dict[int, list[str]] = {}
        for rule, instant in sorted(since.items()):
            found.setdefault(instant, []).append(rule)
        return found

    def _since(self, budget: Budget) -> int:
        """The end after which an attempt may matter. A kept level needs only what is newer."""
        limit = budget.limit
        since = limit.horizon(self.now)
        if not limit.keeps_level or not limit.is_per_rule:
            return since
        kept = levels.kept(self.memo, budget, "", since, self.now)
        return kept.at if kept else since

    def _charge_aged(self, found: Aged, budgets: Sequence[Budget]) -> None:
        for budget in budgets:
            if found.finished_at is None and not _ages_unanswered(budget):
                continue
            if not budget.counts(found.rule, found.released_at):
                continue
            if parts := found.charges(budget.limit):
                self.aged[budget.id, budget.value_of(found.key, found.queue)] += parts


def read(
    using: str,
    book: Book,
    rules: Sequence[str],
    now: int,
    memo: Memo | None = None,
    *,
    until: int | None = None,
    has_corrections: bool = False,
) -> Account:
    """The account of these rules (a whole group) at `now`. As many statements, whatever the backlog
    and the limits.

    `until`: up to when the caller releases; `has_corrections`: whether it is to tell the tallies
    what attempts cost after all, which those who hold the rules' lock may.
    """
    until = now if until is None else until
    account = Account(using, book, tuple(rules), now, until, memo or Memo())
    account.read(has_corrections=has_corrections)
    return account


def save(account: Account) -> None:
    """Write what the tallies became, and put into the memo what the next pass wants to know. Under
    the rules' lock.

    Of other budgets nothing stays in the memo: what this pass released is missing from their
    tallies.
    """
    for one in account.tallies.values():
        one.save()
    account.memo.tallies = {name: one.remembered() for name, one in account.tallies.items()}
    levels.forget_others(account.memo, {budget.id for budget in account.budgets})


def _by_rule(budgets: Iterable[Budget]) -> dict[str, list[Budget]]:
    """By rule, those that count what it releases, or released."""
    found: dict[str, list[Budget]] = defaultdict(list)
    for budget in budgets:
        for rule in {*budget.rules, *(name for name, _ in budget.former)}:
            found[rule].append(budget)
    return found


def _ages_unanswered(budget: Budget) -> bool:
    """Whether an open attempt of which a worker has told ages in the budget. Tallied ones, to those
    who only look, are open until they are answered.
    """
    return budget.limit.ages_unanswered and not is_tallied(budget.limit)
