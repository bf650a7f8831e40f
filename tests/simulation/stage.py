"""Sets the stage: Django on a database of this process's own, with the doors put in."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation import databases
from tests.simulation.settings_of_runs import Rules, callqueue_settings

if TYPE_CHECKING:
    from tests.simulation.broker import Broker

LEFT_OUT = ("admin", "testing", "migrations", "management", "metrics", "backends")


def set_stage(name: str) -> Stage:
    """Everything that runs need, on this database. Once in a Python process."""
    databases.set_django_up(name)
    logging.disable(logging.CRITICAL)
    _import_all()
    from tests.simulation.postgres import Postgres
    from tests.simulation.sqlite import Sqlite

    if os.sep in name:
        return Stage(Sqlite(name))
    return Stage(Postgres(lambda: databases.connection(name)))


class Stage:
    """What all runs of this Python process share: the doors, and the database."""

    broker: Broker  # the run's

    def __init__(self, server: Any) -> None:
        from tests.simulation.connections import OnDatabase
        from tests.simulation.doors import Doors
        from tests.simulation.provider import Wire

        self.server, self.doors = server, Doors()
        self.database = OnDatabase(self.doors, server)
        self.wire = Wire(self.doors)
        self.doors.install()
        self.wire.install()
        self.database.install()
        self._install_broker()

    def _install_broker(self) -> None:
        from callqueue import broker, database

        broker.send = lambda *given, **how: self.broker.send(*given, **how)
        broker.send_by_name = broker.send_beside = lambda *given, **how: None
        # as behind a pooler, where nobody can listen: a dispenser looks by itself then
        database.can_listen = lambda using: False

    def config(self, rules: Rules) -> Any:
        """The settings as a process has them that was started with these rules."""
        from django.conf import settings

        from callqueue import conf

        settings.CALLQUEUE = callqueue_settings(rules)
        config, wrong = conf._read_settings()
        assert not wrong, wrong
        return config


def _import_all() -> None:
    """Every module of the product: the doors are put into what is there."""
    import callqueue

    package = Path(callqueue.__file__).parent
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0] not in LEFT_OUT and parts[-1] != "__init__":
            importlib.import_module(".".join(("callqueue", *parts)))
