"""Fixtures of the behaviour suite; this file is read before Django is set up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command
from django.db import connections

from tests.support.fixtures import remote as remote

if TYPE_CHECKING:
    from callqueue import Rule


@pytest.fixture
def rules(settings: Any, db: None) -> Callable[..., None]:
    """`rules(name=Rule(...))`: the rules from now on; `more` are other keys of CALLQUEUE."""

    def apply(more: dict[str, Any] | None = None, **named: Rule) -> None:
        settings.CALLQUEUE = {"RULES": named, **(more or {})}

    return apply


@pytest.fixture
def trusted_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody begins anything, and is trusted to begin all: limits alone decide what is released."""
    from callqueue.dispatch import choosing

    monkeypatch.setattr(choosing, "LEAST", 1_000_000)


@pytest.fixture(scope="module")
def db_alias(django_db_setup: None, django_db_blocker: Any, tmp_path_factory: Any) -> Iterator[str]:
    """A second database of the project, in a file of its own, with the app's tables."""
    file = tmp_path_factory.mktemp("second") / "calls.sqlite3"
    entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file)}
    before = connections.settings
    connections.settings = connections.configure_settings({**before, "calls": entry})
    with django_db_blocker.unblock():
        call_command("migrate", run_syncdb=True, database="calls", verbosity=0)
    yield "calls"
    connections["calls"].close()
    del connections["calls"]
    connections.settings = before
