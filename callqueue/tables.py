"""The tables, for every package below the models: found in Django's registry when they are used.

So nothing that works on rows imports the models, which themselves import much of the app.
`tables.X` is the model X; the functions give its rows in one database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.db import connections
from django.db.models import QuerySet

if TYPE_CHECKING:
    from callqueue.managers import CallAttemptQuerySet, CallQueueQuerySet
    from callqueue.models import BelatedEnding as BelatedEnding
    from callqueue.models import CallAttempt as CallAttempt
    from callqueue.models import CallQueue as CallQueue
    from callqueue.models import Counted as Counted
    from callqueue.models import DispenserState as DispenserState
    from callqueue.models import Hold as Hold
    from callqueue.models import KeyTurn as KeyTurn
    from callqueue.models import Peak as Peak
    from callqueue.models import PermitRequest as PermitRequest
    from callqueue.models import RuleState as RuleState
    from callqueue.models import Tally as Tally
    from callqueue.models import Total as Total
else:

    def __getattr__(name: str) -> Any:
        try:
            return apps.get_model("callqueue", name)
        except LookupError:
            raise AttributeError(f"callqueue has no model {name!r}") from None


def calls(using: str) -> CallQueueQuerySet:
    """The calls."""
    rows: CallQueueQuerySet = _rows("CallQueue", using)
    return rows


def attempts(using: str) -> CallAttemptQuerySet:
    """The attempts: the ledger."""
    rows: CallAttemptQuerySet = _rows("CallAttempt", using)
    return rows


def holds(using: str) -> QuerySet[Hold]:
    """What keeps rules and keys from being released."""
    rows: QuerySet[Hold] = _rows("Hold", using)
    return rows


def rule_states(using: str) -> QuerySet[RuleState]:
    """The rules' rows, which passes lock."""
    rows: QuerySet[RuleState] = _rows("RuleState", using)
    return rows


def permit_requests(using: str) -> QuerySet[PermitRequest]:
    """The permits that wait for their turn."""
    rows: QuerySet[PermitRequest] = _rows("PermitRequest", using)
    return rows


def dispensers(using: str) -> QuerySet[DispenserState]:
    """The dispensers' signs of life."""
    rows: QuerySet[DispenserState] = _rows("DispenserState", using)
    return rows


def totals(using: str) -> QuerySet[Total]:
    """What was sent and answered, by stretches of time."""
    rows: QuerySet[Total] = _rows("Total", using)
    return rows


def peaks(using: str) -> QuerySet[Peak]:
    """The highest uses of limits, by stretches of time."""
    rows: QuerySet[Peak] = _rows("Peak", using)
    return rows


def counted(using: str) -> QuerySet[Counted]:
    """How far totals and peaks are counted."""
    rows: QuerySet[Counted] = _rows("Counted", using)
    return rows


def name(using: str, model: str) -> str:
    """A model's table, quoted."""
    table = apps.get_model("callqueue", model)._meta.db_table
    return str(connections[using].ops.quote_name(table))


def _rows(model: str, using: str) -> Any:
    """The model's rows. Callers state the type: Django's registry knows none."""
    return apps.get_model("callqueue", model)._default_manager.using(using)
