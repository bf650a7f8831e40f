"""How far limits are used now, as the ledger charges them: exact, and as a release would see it.

In: a database alias, the limits in force. Out: a LimitUse for each limit of each rule. Some
statements for every TOGETHER rules: history, which pages show for all rules at once, tells the
highest use of what has been, and not what is used now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue.ledger import account as ledger
from callqueue.ledger import agreement, tallies
from callqueue.limits.budgets import Book, Budget
from callqueue.operations import formatting, window_use

TOGETHER = 100  # rules that are read at once, unless a group has more


@dataclass(frozen=True)
class LimitUse:
    """One limit. Where it is per queue, of all queues together; where it is per key, of the key
    that used most of it: `value`. `in_flight`: where nothing is free, how much of `used` is of
    calls in flight.
    """

    name: str
    per: str
    unit: str
    rate: str
    capacity: int
    used: int
    free: int
    value: str = ""
    in_flight: int = 0

    def note(self, latency: float) -> str:
        """What it is used up by, where that is calls in flight, of so many seconds; empty
        otherwise.
        """
        if self.free or not latency or 2 * self.in_flight < self.used:
            return ""
        return in_flight_note(self.in_flight, self.unit, latency)


def in_flight_note(amount: int, unit: str, latency: float) -> str:
    """What uses up a limit: so many calls in flight (or of another unit), of so many seconds."""
    values = {"count": amount, "unit": unit, "each": formatting.duration(latency)}
    if unit != "calls":
        text = _("used up by %(count)d %(unit)s of calls in flight, which take %(each)s each")
    else:
        text = ngettext(
            "used up by %(count)d call in flight, which takes %(each)s",
            "used up by %(count)d calls in flight, which take %(each)s each",
            amount,
        )
    return str(text % values)


def of_rules(using: str, book: Book, names: Sequence[str], now: int) -> dict[str, list[LimitUse]]:
    """The limits of each of these rules, in the settings' order."""
    found: dict[str, list[LimitUse]] = {}
    for rules in _together(sorted({book.groups[name] for name in names})):
        account = ledger.read(using, book, rules, now, _memo(using, book, rules))
        tallies.advance(using, account.tallies.values())
        uses = {budget.id: _use(account, budget) for budget in account.budgets}
        found |= {name: [uses[budget.id] for budget in book.budgets[name]] for name in rules}
    return found


def _together(groups: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """The rules of so many groups as one reading is of."""
    rules: list[str] = []
    for group in groups:
        if rules and len(rules) + len(group) > TOGETHER:
            yield rules
            rules = []
        rules = [*rules, *group]
    if rules:
        yield rules


def _memo(using: str, book: Book, rules: Sequence[str]) -> ledger.Memo:
    """What passes remember of the groups of these rules."""
    memos, found = agreement.memos(using, rules), ledger.Memo()
    for group in {book.groups[rule] for rule in rules}:
        remembered = {rule: memos[rule] for rule in group if rule in memos}
        memo = ledger.Memo.load(group, remembered, book.agreement)
        found.levels |= memo.levels
        # What former rules used is taken away by recounts only.
        found.tallies |= {n: kept for n, kept in memo.tallies.items() if not kept["has_former"]}
    return found


def _use(account: ledger.Account, budget: Budget) -> LimitUse:
    limit = budget.limit
    values = _values(account, budget)
    meters = [account.meter(budget, value) for value in values]
    is_summed = limit.is_per_queue
    used, fullest = max(zip((m.used for m in meters), values, strict=True), default=(0, ""))
    free = (sum if is_summed else min)([meter.free for meter in meters] or [limit.capacity])
    # asked of attempts where nothing else knows
    flying = [0 if free else window_use.in_flight(account, budget, value) for value in values]
    return LimitUse(
        name=limit.label,
        per=limit.per,
        unit=limit.unit,
        rate=limit.rate_text,
        capacity=limit.capacity * (len(meters) if is_summed else 1),
        used=sum(meter.used for meter in meters) if is_summed else used,
        free=free,
        value="" if is_summed else fullest,
        in_flight=(sum if is_summed else max)(flying or [0]),
    )


def _values(account: ledger.Account, budget: Budget) -> Sequence[str]:
    """The values of a budget's `per` that it has charges of; of tallied ones the fullest."""
    if budget.limit.is_per_rule:
        return [""]
    if budget.limit.is_per_queue:
        return account.book.queues_of(budget)
    if budget.id in account.tallies:
        return account.tallies[budget.id].fullest()
    return sorted({value for name, value in {**account.open, **account.aged} if name == budget.id})
