"""Dispensers with settings of their own in one process, as of different releases."""

from __future__ import annotations

from callqueue import Rule
from callqueue.dispatch.dispenser import Dispenser
from callqueue.limits.budgets import Book, book_of
from callqueue.models import CallAttempt


class Process(Dispenser):
    """A dispenser with these rules, whose attempts no worker takes. `book` may be replaced."""

    def __init__(self, name: str, **rules: Rule) -> None:
        self.book: Book = book_of(rules)
        super().__init__("default", name=name, settings=lambda: self.book, publish=lambda *_: True)

    def goes(self) -> dict[str, int]:
        """How many calls of each rule it releases now, after a look at the others."""
        newest = CallAttempt.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
        self.membership.is_outdated |= self.membership.party.heartbeat()
        self.run_once(maintain=False)
        made = list(CallAttempt.objects.filter(pk__gt=newest).values_list("rule", flat=True))
        return {rule: made.count(rule) for rule in sorted(set(made))}

    def group_of(self, rule: str) -> tuple[str, ...]:
        """The group that the rule is in."""
        self.joins()
        return next(group for group in self.groups if rule in group)

    def joins(self) -> None:
        """It states its opinion, and releases nothing yet."""
        self._follow_settings()
