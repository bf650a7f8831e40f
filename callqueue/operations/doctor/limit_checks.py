"""What the doctor examines of limits: whether calls in flight keep a rule from its rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from callqueue import conf, database
from callqueue.database import to_us
from callqueue.ledger import agreement
from callqueue.limits.budgets import Book, Budget
from callqueue.limits.kinds import SECOND, Limit
from callqueue.operations import attempts_now, formatting
from callqueue.operations.attempts_now import Rate
from callqueue.operations.doctor.check import Check, well, wrong

ENOUGH = 0.9  # of what the limits allow: less than that is worth a word


def check_reach(using: str) -> Check:
    """No limit of what is in flight, or that waits for answers, keeps a rule from its rate."""
    book, names = agreement.book_in_force(using), list(conf.current().rules)
    rates = attempts_now.read(using, names, to_us(database.clock(using))).rates
    found = [told for name in names for told in _unreachable(book, name, rates[name])]
    if not found:
        return well("reach", "answers are quick enough for every limit")
    return wrong(
        "reach",
        "; ".join(why for why, _ in found),
        "; ".join(todo for _, todo in found),
    )


def _unreachable(book: Book, name: str, rate: Rate) -> Iterator[tuple[str, str]]:
    """By how little each limit that waits for answers lets through beside the slowest of the rule's
    rates, and what to do.
    """
    budgets = [b for b in book.budgets.get(name, ()) if b.limit.unit == "calls"]
    rates = {budget.id: pace for budget in budgets if (pace := _per_second(budget.limit))}
    if not rates or not rate.latency:
        return
    slowest = min(rates.values())
    for budget in budgets:
        limit = budget.limit
        most = _most_per_second(budget, rate, has_redirects=bool(book.rules[name].redirects))
        if most is not None and most < ENOUGH * slowest:
            each = formatting.duration(rate.latency)
            why = (
                f"{name}: calls take {each} each, so {limit.label} lets {most:.3g} a second "
                f"through, and the rates allow {slowest:.3g}"
            )
            yield why, _remedy(limit, name, math.ceil(slowest * rate.latency) + 1)


def _per_second(limit: Limit) -> float | None:
    """The rate of a limit per rule; None where it has none."""
    n = getattr(limit, "n", None)
    if limit.counts_in_flight or not limit.is_per_rule or not limit.period_us or n is None:
        return None
    return float(n) * SECOND / limit.period_us


def _most_per_second(budget: Budget, rate: Rate, *, has_redirects: bool) -> float | None:
    """What a limit lets through whose calls stay charged until they are answered; None where they
    do not.
    """
    limit = budget.limit
    if not limit.is_per_rule or limit.is_calendar:
        return None
    if limit.counts_in_flight:
        return limit.capacity / rate.latency
    if limit.ages_unanswered and rate.is_stamped and not has_redirects:
        return None
    window = 0 if limit.keeps_level else limit.window_us / SECOND
    return limit.capacity / (window + rate.latency)


def _remedy(limit: Limit, name: str, wanted: int) -> str:
    """What to set, to let the rates be reached."""
    if limit.counts_in_flight:
        return f"if the provider allows it, set Concurrency({wanted}) in {name}"
    if limit.keeps_level:
        return f"if the provider allows it, give {limit.label} of {name} a burst of {wanted}"
    if limit.strict:
        return (
            f"leave strict=True out of {limit.label} of {name}, if the provider counts at arrival"
        )
    return f"{limit.label} of {name} waits for answers: where redirects may follow, or without HTTP"
