"""callqueue_uninstall: callqueue's things go, and nothing of others, by what the command says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import modify_settings
from django_celery_beat.models import PeriodicTask

from callqueue import states
from callqueue.apps import refuse_to_take_others_along
from callqueue.management.commands import callqueue_uninstall
from callqueue.models import CallQueue
from tests.db.commands import run

CALL = {"method": "get", "params": {"url": "https://a.example/"}}
COLUMNS = {
    "plain": "call_id bigint",
    "unique": "call_id bigint UNIQUE",
    "primary": "call_id bigint PRIMARY KEY",
}


@pytest.fixture
def uninstalled(transactional_db: None) -> Iterator[None]:
    yield
    call_command("migrate", verbosity=0)
    ContentType.objects.clear_cache()


@pytest.mark.parametrize("name", COLUMNS)
def test_rows_of_others_that_point_at_calls_stay_with_all_values(
    uninstalled: None, name: str
) -> None:
    """And what was shown before is what is dropped; with nothing there, nothing is."""
    run("schedule")
    (call,) = CallQueue.objects.send_many([CALL])
    with connection.cursor() as cursor:
        reference = "FOREIGN KEY (call_id) REFERENCES callqueue_callqueue (id)"
        cursor.execute(f"CREATE TABLE shop_order ({COLUMNS[name]}, {reference})")
    try:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO shop_order (call_id) VALUES (%s)", [call.pk])
        shown = run("uninstall").out
        for word in (
            "shop_order.call_id",
            "callqueue_callattempt",
            "row of django_migrations: 0001_initial",
            "requeue_call",
            "callqueue.dispenser",
            "1 call is unfinished",
            "nothing was changed",
        ):
            assert word in shown
        assert "1 call is unfinished" in run("uninstall", "--yes").error
        assert run("uninstall").out == shown
        said = run("uninstall", "--yes", "--force").out
        assert set(said.splitlines()[1:-1]) <= set(shown.splitlines())
        assert "would drop from default:\n  nothing\n" in run("uninstall").out
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO shop_order (call_id) VALUES (%s)", [call.pk + 1])
            cursor.execute("SELECT call_id FROM shop_order ORDER BY 1")
            assert [pk for (pk,) in cursor.fetchall()] == [call.pk, call.pk + 1]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE shop_order")


def test_it_names_the_old_migrations_that_their_owner_is_to_change(
    uninstalled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = [("callqueue", "0001_initial")], [("auth", "0001_initial")]
    found = {
        ("callqueue", "0001_initial"): SimpleNamespace(dependencies=others, run_before=[]),
        ("crm", "0003_late"): SimpleNamespace(dependencies=others, run_before=ours),
        ("shop", "0001_initial"): SimpleNamespace(dependencies=[*others, *ours], run_before=[]),
        ("shop", "0002_more"): SimpleNamespace(dependencies=others, run_before=[]),
    }
    loaded = SimpleNamespace(disk_migrations=found)
    monkeypatch.setattr(callqueue_uninstall, "MigrationLoader", lambda *_, **__: loaded)
    named = [line.split(":")[0].strip() for line in run("uninstall").out.splitlines()]
    assert [line for line in named if line.startswith("the migration")] == [
        "the migration crm.0003_late",
        "the migration shop.0001_initial",
    ]


def test_migrate_to_zero_takes_no_app_along() -> None:
    """Which Django would do, with all rows of theirs, and ask nothing."""
    shop, ours = (SimpleNamespace(app_label=label) for label in ("shop", "callqueue"))
    with pytest.raises(CommandError, match="would be undone first"):
        refuse_to_take_others_along([(shop, True), (ours, True)])
    refuse_to_take_others_along([(ours, True)])
    refuse_to_take_others_along([(shop, True)])


def test_who_had_a_permission_has_it_no_more_and_the_log_stays(uninstalled: None) -> None:
    calls = ContentType.objects.get(app_label="callqueue", model="callqueue")
    person = User.objects.create(username="u")
    entry = LogEntry.objects.create(
        user=person, content_type=calls, object_id="1", object_repr="one", action_flag=CHANGE
    )
    group = Group.objects.create(name="operators")
    group.permissions.add(Permission.objects.get(codename="requeue_call"))
    person.user_permissions.add(Permission.objects.get(codename="cancel_call"))
    assert run("uninstall", "--yes").code == 0
    assert not Permission.objects.filter(content_type__app_label="callqueue").exists()
    entry.refresh_from_db()
    assert entry.content_type == calls
    assert group.permissions.count() == person.user_permissions.count() == 0


def test_periodic_tasks_of_your_own_stay_and_all_without_django_celery_beat(
    uninstalled: None,
) -> None:
    run("schedule")
    mine = PeriodicTask.objects.get(task="callqueue.dispenser")
    mine.pk, mine.name = None, "mine"
    mine.save()
    with modify_settings(INSTALLED_APPS={"remove": "django_celery_beat"}):
        assert "periodic" not in run("uninstall").out
        assert run("uninstall", "--yes").code == 0
    assert "callqueue_callqueue" not in connection.introspection.table_names()
    assert PeriodicTask.objects.filter(task__startswith="callqueue").count() == 4
    assert run("uninstall", "--yes").code == 0
    assert list(PeriodicTask.objects.filter(task__startswith="callqueue")) == [mine]


def test_unfinished_calls_refuse_and_ended_ones_do_not(uninstalled: None) -> None:
    call = CallQueue.objects.send(CALL)
    for status in states.UNFINISHED:
        CallQueue.objects.filter(pk=call.pk).update(status=status)
        assert run("uninstall", "--yes").code == 1
        assert "callqueue_callqueue" in connection.introspection.table_names()
    call.delete()
    for status in set(CallQueue.Status) - set(states.UNFINISHED):
        CallQueue(rule="r", call_data={}, status=status).save()
    assert run("uninstall", "--yes").code == 0
    assert "callqueue_callqueue" not in connection.introspection.table_names()


@pytest.mark.parametrize(
    "column",
    [
        "call_id bigint REFERENCES callqueue_callqueue",
        'call_id bigint CONSTRAINT "c" REFERENCES `callqueue_callqueue` (id) ON DELETE CASCADE NOT NULL',
        "call_id bigint, other text, FOREIGN KEY (call_id) REFERENCES [callqueue_callqueue] (id)",
        'call_id bigint, note text DEFAULT 1, CONSTRAINT c FOREIGN KEY(call_id) REFERENCES "callqueue_callqueue"("id") MATCH FULL'
        " ON UPDATE SET NULL DEFERRABLE INITIALLY DEFERRED",
    ],
)
def test_sqlite_s_foreign_keys_go_however_they_are_written(uninstalled: None, column: str) -> None:
    if connection.vendor != "sqlite":
        pytest.skip("the others drop constraints by name")
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE other (id integer PRIMARY KEY)")
        cursor.execute(f"CREATE TABLE host (other_id bigint REFERENCES other (id), {column})")
        try:
            cursor.execute("CREATE INDEX host_call ON host (call_id)")
            cursor.execute("CREATE TRIGGER host_t AFTER INSERT ON host BEGIN SELECT 1; END")
            CallQueue(pk=7, rule="r", call_data={}).save()
            cursor.execute("INSERT INTO host (call_id) VALUES (7)")
            assert run("uninstall", "--yes", "--force").code == 0
            cursor.execute("INSERT INTO host (call_id) VALUES (8)")
            cursor.execute("SELECT call_id FROM host")
            assert [value for (value,) in cursor.fetchall()] == [7, 8]
            cursor.execute("SELECT \"table\" FROM pragma_foreign_key_list('host')")
            assert cursor.fetchall() == [("other",)]
            cursor.execute("SELECT name FROM sqlite_master WHERE tbl_name = 'host' ORDER BY 1")
            assert [name for (name,) in cursor.fetchall()] == ["host", "host_call", "host_t"]
            cursor.execute("PRAGMA integrity_check")
            assert cursor.fetchall() == [("ok",)]
        finally:
            cursor.execute("DROP TABLE host")
            cursor.execute("DROP TABLE other")


@pytest.mark.parametrize("what", ["row", "view"])
def test_where_something_of_yours_hangs_on_what_would_go_nothing_is_dropped(
    uninstalled: None, what: str
) -> None:
    """A row on a permission; a view on a table, which would go, too, with CASCADE."""
    if what == "view" and connection.vendor != "postgresql":
        pytest.skip("the others let a view stand without its table")
    ours = Permission.objects.get(codename="requeue_call")
    (column,) = [one for one in Permission._meta.local_fields if one.primary_key]
    reference = "FOREIGN KEY (p) REFERENCES auth_permission (id)"
    mine = {
        "row": f"TABLE mine (p {column.rel_db_type(connection)}, {reference})",
        "view": "VIEW mine AS SELECT id FROM callqueue_callqueue",
    }
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE {mine[what]}")
        if what == "row":
            cursor.execute("INSERT INTO mine (p) VALUES (%s)", [ours.pk])
    try:
        ran = run("uninstall", "--yes")
        assert ran.code == 1
        assert ("the database refused" if what == "row" else "mine") in ran.error
        assert CallQueue.objects.count() == 0
        ours.refresh_from_db()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP " + ("TABLE" if what == "row" else "VIEW") + " mine")
