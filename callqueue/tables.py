"""The tables, for every package below the models: found in Django's registry when they are used. So
nothing that works on rows imports the models, which themselves import much of the app. `tables.X`
is the model X; the functions give its rows in one database.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

from django.apps import apps
from django.db import connections
from django.db.models import QuerySet

if TYPE_CHECKING:
    from callqueue.managers import CallAttemptQuerySet, CallQueueQuerySet
    from callqueue.models import BelatedEnding as BelatedEnding
    from callqueue.models import CallAttempt as CallAttempt
    from callqueue.models import CallQueue as CallQueue
    from callqueue.models import DispenserState as DispenserState
    from callqueue.models import Hold as Hold
    from callqueue.models import KeyNews as KeyNews
    from callqueue.models import KeyTurn as KeyTurn
    from callqueue.models import LedgerState as LedgerState
    from callqueue.models import OpinionState as OpinionState
    from callqueue.models import RuleState as RuleState
    from callqueue.models import SettingsState as SettingsState
    from callqueue.models import Sum as Sum
    from callqueue.models import Summed as Summed
    from callqueue.models import Tally as Tally
else:

    def __getattr__(name: str) -> Any:
        try:
            return apps.get_model("callqueue", name)
        except LookupError:
            raise AttributeError(f"callqueue has no model {name!r}") from None


def calls(using: str) -> CallQueueQuerySet:
    return cast("CallQueueQuerySet", _queryset_of("CallQueue", using))


def attempts(using: str) -> CallAttemptQuerySet:
    return cast("CallAttemptQuerySet", _queryset_of("CallAttempt", using))


def holds(using: str) -> QuerySet[Hold]:
    return _queryset_of("Hold", using)


def rule_states(using: str) -> QuerySet[RuleState]:
    return _queryset_of("RuleState", using)


def ledger_state(using: str) -> QuerySet[LedgerState]:
    return _queryset_of("LedgerState", using)


def settings_state(using: str) -> QuerySet[SettingsState]:
    return _queryset_of("SettingsState", using)


def opinions(using: str) -> QuerySet[OpinionState]:
    return _queryset_of("OpinionState", using)


def dispensers(using: str) -> QuerySet[DispenserState]:
    return _queryset_of("DispenserState", using)


def sums(using: str) -> QuerySet[Sum]:
    return _queryset_of("Sum", using)


def summed(using: str) -> QuerySet[Summed]:
    return _queryset_of("Summed", using)


@cache  # a pass asks eight times
def name(using: str, model: str) -> str:
    """A model's table, quoted."""
    table = apps.get_model("callqueue", model)._meta.db_table
    return str(connections[using].ops.quote_name(table))


def _queryset_of(model: str, using: str) -> QuerySet[Any]:
    # callers state the type: Django's registry knows none
    rows: QuerySet[Any] = apps.get_model("callqueue", model)._default_manager.using(using)
    return rows
