"""Migrations all the way back with rows, what they made, and old code on new tables."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader

import callqueue
from callqueue import Rule
from callqueue.database import rows
from callqueue.models import CallAttempt, CallQueue


@pytest.fixture
def migrated(transactional_db: None) -> Any:
    yield
    call_command("migrate", "callqueue", verbosity=0)


def test_all_the_way_back_with_rows_and_forward_again(migrated: None, settings: Any) -> None:
    """Calls, attempts and permits are no hindrance; nothing stays."""
    settings.CALLQUEUE = {"RULES": {"default": Rule()}}
    CallQueue.objects.send({"method": "get", "params": {"url": "https://api.example/"}})
    with callqueue.permit():
        pass
    assert CallAttempt.objects.filter(call__method="permit").exists()
    call_command("migrate", "callqueue", "zero", verbosity=0)
    tables = connection.introspection.table_names()
    assert not [table for table in tables if table.startswith("callqueue_")]
    if connection.vendor == "postgresql":
        assert not rows("default", "SELECT 1 FROM pg_proc WHERE proname LIKE 'callqueue%%'")
    call_command("migrate", "callqueue", verbosity=0)
    assert CallQueue.objects.count() == 0


def test_text_is_told_apart_in_every_table(db: None) -> None:
    if connection.vendor != "mysql":
        pytest.skip("MariaDB and MySQL alone take `a` and `A` for one")
    for column, of in (("table_collation", "tables"), ("collation_name", "columns")):
        sql = f"""SELECT DISTINCT {column} FROM information_schema.{of} WHERE table_schema = DATABASE()
            AND table_name LIKE 'callqueue\\_%%' AND {column} IS NOT NULL"""
        assert list(rows("default", sql)) == [("utf8mb4_nopad_bin",)]


def test_every_index_is_there_on_every_database_and_nothing_is_warned_of(db: None) -> None:
    """Django leaves out, and warns of, indexes on expressions where there are none."""
    with connection.cursor() as cursor:
        for model in apps.get_app_config("callqueue").get_models():
            there = connection.introspection.get_constraints(cursor, model._meta.db_table)
            wanted = {one.name for one in (*model._meta.indexes, *model._meta.constraints)}
            assert wanted <= set(there)
            assert model.check(databases=["default"]) == []


def test_old_code_runs_on_new_tables(db: None) -> None:
    """What a migration has added has a default, or may be empty: old senders do not know it."""
    loader = MigrationLoader(connection)
    for node in sorted(node for node in loader.disk_migrations if node[0] == "callqueue"):
        old = loader.project_state(node).apps.get_model("callqueue", "CallQueue")
        call = old.objects.create(rule="r", call_data={"method": "get", "params": {}}, ready=False)
        assert CallQueue.objects.get(pk=call.pk).status == CallQueue.Status.NEW
