"""The list of attempts: what is filtered by outcome, answer, rule and time, and searched by call
and key, as indexes have it.

What failed or was answered with anything but success has an index of its own; the rest is found by
its rule and the time when it ended. What is open comes first.
"""

from __future__ import annotations

from typing import Any

from django.db.models import F, Q, QuerySet

from callqueue import database, states
from callqueue.admin.attempt_filters import ANSWER, CLASSES, NONE, OPEN, OUTCOME, RULE
from callqueue.admin.changelist import MergedList, Stretches
from callqueue.models import CallAttempt
from callqueue.models.attempts import UNUSUAL

BY_TIME = ("-at", "-pk")
TABLE = CallAttempt._meta.db_table
# what every row of the index callqueue_unusual is, and of the index callqueue_aging
IS_UNUSUAL = (
    f"(outcome IN ({', '.join(repr(outcome) for outcome in states.FAULTY)})"
    f" OR response_status >= {states.BEYOND_SUCCESS})"
)
HAS_ENDED = "finished_at IS NOT NULL"


def searched(rows: QuerySet[Any], term: str) -> QuerySet[Any]:
    """The attempts of the call of this number, and those with this key."""
    term = term.strip()
    if not term:
        return rows
    if "\x00" in term:
        return rows.none()
    of_call = Q(call_id=int(term)) if term.isdecimal() and len(term) <= 18 else None
    if of_call and CallAttempt.objects.using(rows.db).filter(of_call).exists():
        return rows.filter(of_call)
    return rows.filter(key=term)


class AttemptList(MergedList):
    """The change list of attempts."""

    def stretches(self, rows: QuerySet[Any]) -> Stretches | None:
        found = self._found(rows.order_by()) if rows.query.where else None
        return None if found is None else Stretches(found, BY_TIME)

    def _found(self, rows: QuerySet[Any]) -> list[database.Stretch] | None:
        outcome, answer = self._asked(OUTCOME), self._asked(ANSWER)
        began: list[database.Stretch] = [
            rows.filter(finished_at__isnull=True).annotate(at=F("released_at"))
        ]
        ended = rows.filter(finished_at__isnull=False).annotate(at=F("finished_at"))
        if outcome == OPEN:
            return began
        least = CLASSES.get(answer, int(answer) if answer.isdecimal() and len(answer) < 5 else 0)
        is_unusual = outcome in states.FAULTY or answer == NONE or least >= states.BEYOND_SUCCESS
        more = self._unusual(ended) if is_unusual else self._by_rule(ended)
        return None if more is None else [*([] if outcome else began), *more]

    def _unusual(self, ended: QuerySet[Any]) -> list[database.Stretch] | None:
        """By rule, outcome and answer, each combination that there is; and by rule and outcome what
        had no answer.
        """
        ended = ended.filter(UNUSUAL)  # by which PostgreSQL sees that the index has them all
        given = {"rule": self._asked(RULE), "outcome": self._asked(OUTCOME)}
        given = {column: value for column, value in given.items() if value}
        pairs = self._combinations(ended, ("rule", "outcome"), given, IS_UNUSUAL)
        columns = ("rule", "outcome", "response_status")
        each = self._combinations(ended, columns, given, IS_UNUSUAL)
        if pairs is None or each is None or len(pairs) + len(each) > database.MOST:
            return None
        without = ended.filter(response_status__isnull=True)
        unanswered = database.Alike(without, columns[:2], pairs)
        answered = database.Alike(ended, columns, each)
        answer = self._asked(ANSWER)
        return [unanswered] if answer == NONE else [answered] if answer else [unanswered, answered]

    def _by_rule(self, ended: QuerySet[Any]) -> list[database.Stretch] | None:
        given = {"rule": self._asked(RULE)} if self._asked(RULE) else {}
        each = self._combinations(ended, ("rule",), given, HAS_ENDED)
        return None if each is None else [database.Alike(ended, ("rule",), each)]

    def _combinations(
        self, rows: QuerySet[Any], columns: tuple[str, ...], given: dict[str, str], where: str
    ) -> list[tuple[Any, ...]] | None:
        return database.combinations(rows.db, TABLE, columns, given, where)

    def _asked(self, name: str) -> str:
        """What the address says of a filter; empty where it says nothing."""
        return str(self.params.get(name, ""))
