"""Doctor: examines what callqueue needs, from the settings to the workers, and says what to do
about what is wrong.

Out: one Check for each thing, with the reason and the remedy. Changes nothing. What cannot be found
out in a few seconds counts as wrong, and so does an examination that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from callqueue import conf, database
from callqueue.look.doctor import ledger, processes, surroundings
from callqueue.look.doctor.facts import Facts, Wrong
from callqueue.look.doctor.surroundings import broker_refusal, database_refusal
from callqueue.texts import in_one_line

__all__ = ["Check", "broker_refusal", "database_refusal", "examine", "examined"]

Examination = Callable[[Facts], str]  # the detail where all is well; Wrong where it is not

BY_THEMSELVES: Mapping[str, Examination] = {
    "settings": surroundings.settings,
    "broker": surroundings.broker,
    "confirmed messages": surroundings.confirmed_messages,
}
WITH_SETTINGS: Mapping[str, Examination] = {
    "visibility timeout": surroundings.visibility_timeout,
    "database": surroundings.database_answers,
}
WITH_DATABASE: Mapping[str, Examination] = {"migrations": surroundings.migrations}
WITH_TABLES: Mapping[str, Examination] = {
    "clock": surroundings.clock,
    "dispenser": processes.dispenser,
    "agreement": processes.agreement,
    "schedule": surroundings.schedule,
    "stuck calls": ledger.stuck_calls,
    "rules": ledger.rules,
    "reach": ledger.reach,
    "bloat": surroundings.bloat,
    "workers": processes.workers,
    "one broker": processes.one_broker,
    "begun": processes.begun,
    "settings of workers": processes.settings_of_workers,
    "ledger": ledger.time,
}
ALL = {**BY_THEMSELVES, **WITH_SETTINGS, **WITH_DATABASE, **WITH_TABLES}


@dataclass(frozen=True)
class Check:
    """One thing examined. `todo` is empty where it is well."""

    name: str
    ok: bool
    detail: str
    todo: str = ""


def examine(using: str) -> list[Check]:
    """All checks. Without settings, database or tables, those that need them are left out: they
    would say the same.
    """
    facts = Facts(using)
    checks = [examined(name, facts) for name in BY_THEMSELVES]
    if conf.problems():
        return checks
    facts.asks_workers = all(check.ok for check in checks if check.name == "broker")
    for group in (WITH_SETTINGS, WITH_DATABASE, WITH_TABLES):
        checks += [examined(name, facts) for name in group]
        if any(not check.ok and check.name in ("database", "migrations") for check in checks):
            break
    return checks


def examined(name: str, facts: Facts) -> Check:
    """One of them. That it could not be made is a finding too."""

    def examine() -> Check:
        return Check(name, True, ALL[name](facts))

    try:
        if name not in WITH_TABLES:
            return examine()
        return database.persist(facts.using, examine, during="doctor", seconds=1)
    except Wrong as wrong:
        return Check(name, False, wrong.detail, wrong.todo)
    except Exception as error:
        why = f"could not be examined: {in_one_line(error)}"
        return Check(name, False, why, "see the other checks first")
