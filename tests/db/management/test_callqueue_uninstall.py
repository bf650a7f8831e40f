"""callqueue_uninstall: a project that has rows of its own beside callqueue's leaves it, by what the
command says and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import Group, Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import connection
from django_celery_beat.models import PeriodicTask

from callqueue import states
from callqueue.models import CallQueue
from tests.db.commands import run

ROOT = Path(__file__).parents[3]

SETTINGS = """
import os

from tests.settings import DATABASES

SECRET_KEY, USE_TZ, CELERY_BROKER_URL = "of a test", True, "memory://"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "shop"]
if "HAS_LEFT" not in os.environ:
    INSTALLED_APPS += ["callqueue", "django_celery_beat"]
if "NO_BEAT" in os.environ:
    INSTALLED_APPS.remove("django_celery_beat")
"""
MODELS = """
from django.db import models


class Order(models.Model):
    name = models.CharField(max_length=20)
    call = models.ForeignKey("callqueue.CallQueue", null=True, on_delete=models.SET_NULL, related_name="+")
    paid_by = models.OneToOneField("callqueue.CallQueue", blank=True, null=True, on_delete=models.SET_NULL)
    reminders = models.ManyToManyField("callqueue.CallQueue", related_name="+")

    class Meta:
        indexes = [models.Index(fields=["call", "name"], name="shop_by_call")]
"""
LATER = """

class Invoice(models.Model):
    order = models.ForeignKey(Order, on_delete=models.CASCADE)
    note = models.TextField(default="none")
"""
ODD = """
from django.db import models


class Receipt(models.Model):
    call = models.OneToOneField("callqueue.CallQueue", models.CASCADE, primary_key=True)
    attempt = models.ForeignKey("callqueue.CallAttempt", models.SET_NULL, null=True, db_index=False)
"""
BY_NAME = """
    rule = models.ForeignKey("callqueue.RuleState", models.CASCADE)
"""
FILL = """
import callqueue
from callqueue.models import CallQueue
from shop.models import Invoice, Order
call, paid = CallQueue.objects.send_many([{"method": "get", "params": {"url": "https://a.example/"}}] * 2)
order = Order.objects.create(name="first", call=call, paid_by=paid)
order.reminders.add(call, paid)
Invoice.objects.create(order=order, note="made after the foreign key")
with callqueue.permit():
    pass
"""
STILL = """
from django.db import connection
from shop.models import Invoice, Order
order = Order.objects.get(name="first")
print(order.call, order.paid_by, Invoice.objects.get(order=order).note)
Order.objects.create(name="second", call=4711)
with connection.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM shop_order_reminders")
    print(cursor.fetchone()[0], [t for t in connection.introspection.table_names(cursor) if t.startswith("callqueue")])
"""


class Project:
    """A project with an app `shop`, in a folder and a database of its own."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder = folder
        kept = {
            name: text for name, text in os.environ.items() if name != "CALLQUEUE_TEST_SETTINGS"
        }
        path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = {
            **kept,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "DJANGO_SETTINGS_MODULE": "scratch_settings",
            "CALLQUEUE_TEST_DB_NAME": database,
        }
        (folder / "shop").mkdir()
        (folder / "shop" / "__init__.py").touch()
        self.write("scratch_settings.py", SETTINGS)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def run(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def follow(self, said: str) -> int:
        """Do what the command says is left to do by hand; how many lines that was."""
        done = 0
        for path, place, what in re.findall(r"^  (/\S+), (.+?): (.+)$", said, re.MULTILINE):
            done += 1
            file = Path(path)
            before = file.read_text(encoding="utf-8")
            after = _edited(before, place.rpartition(".")[2], what)
            assert after != before, f"{place}: {what}\n{before}"
            file.write_text(after, encoding="utf-8")
        return done


def _edited(text: str, field: str, what: str) -> str:
    if node := re.fullmatch(r"take out (\(.*\))", what):
        return re.sub(rf"^ *{re.escape(node[1])},\n", "", text, flags=re.MULTILINE)
    new = re.fullmatch(r"write (.+)", what)
    in_migration = rf"^( *)\('{field}', models\.\w+\(.*\)\),\n"
    in_model = rf"^( *){field} = models\.\w+\(.*\)\n"
    for pattern, line in ((in_migration, "('{0}', {1}),"), (in_model, "{0} = {1}")):
        put = f"\\1{line.format(field, new[1])}\n" if new else ""
        text = re.sub(pattern, put, text, flags=re.MULTILINE)
    return text


@pytest.fixture
def project(tmp_path: Path, transactional_db: None) -> Iterator[Project]:
    if connection.vendor == "sqlite":
        yield Project(tmp_path, str(tmp_path / "scratch.sqlite3"))
        return
    name = f"callqueue_left_{secrets.token_hex(4)}"
    quoted = connection.ops.quote_name(name)
    with connection._nodb_cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {quoted}")
        try:
            yield Project(tmp_path, name)
        finally:
            cursor.execute(f"DROP DATABASE {quoted}")


@pytest.mark.parametrize("later", [False, True], ids=["one migration", "a later one"])
def test_a_project_with_rows_that_point_at_calls_leaves_and_keeps_them(
    project: Project, later: bool
) -> None:
    project.write("shop/models.py", MODELS if later else MODELS + LATER)
    project.run("makemigrations", "shop")
    project.write("shop/models.py", MODELS + LATER)
    if later:
        project.run("makemigrations", "shop")
    project.run("migrate")
    project.run("callqueue_schedule")
    project.run("shell", "--command", FILL)

    shown = project.run("callqueue_uninstall")
    for word in (
        "shop_order.call_id",
        "shop_order.paid_by_id",
        "shop_order_reminders.callqueue_id",
        "callqueue_callattempt",
        "row of django_migrations",
        "requeue_call",
        "callqueue.dispenser",
        "2 calls are unfinished",
        "nothing was changed",
    ):
        assert word in shown
    refused = project.run("callqueue_uninstall", "--yes", code=1)
    assert "2 calls are unfinished" in refused
    assert project.run("callqueue_uninstall") == shown
    refused = project.run("migrate", "callqueue", "zero", code=1)
    assert "shop.0001_initial would be undone first" in refused
    project.run("callqueue_cancel", "--all")

    said = project.run("callqueue_uninstall", "--yes")
    assert "nothing was changed" not in said
    assert "would drop from default:\n  nothing\n" in project.run("callqueue_uninstall")
    assert project.follow(said) == 7
    project.environment["HAS_LEFT"] = "1"
    assert "No changes" in project.run("makemigrations", "--check", "shop")
    project.run("migrate")
    out = project.run("shell", "--verbosity", "0", "--command", STILL)
    assert out == "1 2 made after the foreign key\n2 []\n"


def test_a_project_without_django_celery_beat_leaves_and_its_odd_columns_stay_as_they_are(
    project: Project,
) -> None:
    project.environment["NO_BEAT"] = "1"
    by_name = connection.vendor != "mysql"  # where text of callqueue's has a collation of its own
    project.write("shop/models.py", ODD + (BY_NAME if by_name else ""))
    project.run("makemigrations", "shop")
    project.run("migrate")
    said = project.run("callqueue_uninstall", "--yes")
    assert "would drop from default:\n  nothing\n" in project.run("callqueue_uninstall")
    assert project.follow(said) == (7 if by_name else 5)
    models = (project.folder / "shop" / "models.py").read_text(encoding="utf-8")
    assert (
        'models.BigIntegerField(db_column="call_id", primary_key=True, serialize=False)' in models
    )
    assert 'models.BigIntegerField(db_column="attempt_id", null=True)' in models
    wanted = 'models.CharField(db_column="rule_id", max_length=100, db_index=True)'
    assert (wanted in models) == by_name
    project.environment.update(HAS_LEFT="1")
    del project.environment["NO_BEAT"]
    assert "No changes" in project.run("makemigrations", "--check", "shop")
    project.run("migrate")


@pytest.fixture
def uninstalled(transactional_db: None) -> Iterator[None]:
    yield
    call_command("migrate", verbosity=0)
    ContentType.objects.clear_cache()


def test_what_rows_of_others_point_at_stays_and_is_named(uninstalled: None) -> None:
    calls = ContentType.objects.get(app_label="callqueue", model="callqueue")
    person = User.objects.create(username="u")
    entry = LogEntry.objects.create(
        user=person, content_type=calls, object_id="1", object_repr="one", action_flag=CHANGE
    )
    group = Group.objects.create(name="operators")
    group.permissions.add(Permission.objects.get(codename="requeue_call"))
    ran = run("uninstall", "--yes")
    assert ran.code == 0
    assert "stays: the content type callqueue: 1 of admin.LogEntry point at it" in ran.out
    assert set(ContentType.objects.filter(app_label="callqueue")) == {calls}
    assert not Permission.objects.filter(content_type__app_label="callqueue").exists()
    entry.refresh_from_db()
    assert entry.content_type == calls
    assert group.permissions.count() == 0


def test_periodic_tasks_of_your_own_stay(uninstalled: None) -> None:
    run("schedule")
    mine = PeriodicTask.objects.get(task="callqueue.dispenser")
    mine.pk, mine.name = None, "mine"
    mine.save()
    assert run("uninstall", "--yes").code == 0
    assert list(PeriodicTask.objects.filter(task__startswith="callqueue")) == [mine]


@pytest.mark.parametrize("status", sorted(CallQueue.Status))
def test_unfinished_calls_refuse_and_force_does_not(uninstalled: None, status: int) -> None:
    call = CallQueue.objects.send({"method": "get", "params": {"url": "https://a.example/"}})
    CallQueue.objects.filter(pk=call.pk).update(status=status)
    code = run("uninstall", "--yes").code
    assert code == (1 if status in states.UNFINISHED else 0)
    assert ("callqueue_callqueue" in connection.introspection.table_names()) == bool(code)
    assert run("uninstall", "--yes", "--force").code == 0
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


def test_where_a_view_of_yours_hangs_on_a_table_nothing_is_dropped(uninstalled: Any) -> None:
    """With CASCADE it would go, too."""
    if connection.vendor != "postgresql":
        pytest.skip("the others let a view stand without its table")
    with connection.cursor() as cursor:
        cursor.execute("CREATE VIEW mine AS SELECT id FROM callqueue_callqueue")
    try:
        ran = run("uninstall", "--yes")
        assert ran.code == 1
        assert "mine" in ran.error
        assert CallQueue.objects.count() == 0
        assert Permission.objects.filter(codename="requeue_call").exists()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP VIEW mine")
