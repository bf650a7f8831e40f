"""Doctor: examines what callqueue needs, from the settings to the workers, and says what to do
about what is wrong.

Out: one Check for each thing, with the reason and the remedy. Changes nothing. What cannot be found
out in a few seconds counts as wrong, and so does an examination that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callqueue import database
from callqueue.operations.doctor.broker_checks import (
    broker_refusal,
    check_broker,
    check_confirms,
    check_queues_of_control,
    check_visibility,
)
from callqueue.operations.doctor.check import Check, wrong
from callqueue.operations.doctor.database_checks import (
    check_agreement,
    check_bloat,
    check_clock,
    check_database,
    check_dispenser,
    check_migrations,
    check_rules,
    check_stuck,
    database_refusal,
)
from callqueue.operations.doctor.limit_checks import check_reach
from callqueue.operations.doctor.settings_checks import (
    check_application,
    check_schedule,
    check_settings,
)
from callqueue.operations.doctor.worker_checks import Workers, check_ledger, check_workers
from callqueue.texts import in_one_line

__all__ = ["Check", "broker_refusal", "database_refusal", "examine"]

OF_THE_DATABASE: tuple[Callable[[str], Check], ...] = (
    check_clock,
    check_dispenser,
    check_agreement,
    check_schedule,
    check_stuck,
    check_rules,
    check_reach,
    check_bloat,
)
OF_THE_WORKERS: tuple[Callable[[str, Workers], Check], ...] = (check_workers, check_ledger)


def examine(using: str) -> list[Check]:
    """All checks. Without settings, database or tables, those that need them are left out: they
    would say the same.
    """
    settings, application, broker = check_settings(), check_application(), _tried(check_broker)
    if not settings.ok:
        return [settings, application, broker, _tried(check_confirms)]
    checks = [settings, application, check_database(using)]
    if checks[-1].ok:
        checks.append(_tried(check_migrations, using))
    has_tables = all(check.ok for check in checks)
    checks += [broker, _tried(check_confirms), _tried(check_visibility)]
    if broker.ok:
        checks.append(_tried(check_queues_of_control))
    if has_tables:
        workers = Workers.asked(using) if broker.ok else Workers({}, [])
        checks += [_tried(check, using) for check in OF_THE_DATABASE]
        checks += [_tried(check, using, workers) for check in OF_THE_WORKERS]
    return checks


def _tried(check: Callable[..., Check], *arguments: Any) -> Check:
    """The check, or that it failed: a doctor who faints helps nobody."""
    try:
        return (
            database.persist(arguments[0], lambda: check(*arguments), during="doctor", seconds=1)
            if arguments
            else check()
        )
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return wrong(
            name, f"could not be examined: {in_one_line(error)}", "see the other checks first"
        )
