"""callqueue_uninstall: drops what callqueue has in the database, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.contrib.auth import get_user_model
from django.core.management.base import CommandParser
from django.db import connections, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import QuerySet

from callqueue import database, states, tables
from callqueue.maintenance import periodic
from callqueue.management.base import CallQueueCommand, problem, with_noun

QUOTES = dict.fromkeys(map(ord, '`"'))


@dataclass(frozen=True)
class Plan:
    """What is to be dropped."""

    tables: list[str]
    foreign_keys: list[database.ForeignKey]
    rows: dict[str, QuerySet[Any]]  # of Django's own tables, by what they are called
    periodic_tasks: list[str]  # names
    unfinished: int  # calls


class Command(CallQueueCommand):
    help = (
        "Show what removing callqueue would drop from the database; with --yes, drop it. No row "
        "and no column of another app is touched."
    )
    is_repeatable = False

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--yes", action="store_true", help="drop it")
        parser.add_argument(
            "--force", action="store_true", help="although calls are unfinished: they are lost"
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        with transaction.atomic(using=using):
            if options["yes"]:
                database.lock_tables(using, database.existing_tables(using, _own_tables()))
            plan = _read_plan(using)
            what = _plan_in_lines(plan)
            is_refused = plan.unfinished and not options["force"]
            are = "is" if plan.unfinished == 1 else "are"
            unfinished = f"{with_noun(plan.unfinished)} {are} unfinished"
            if options["yes"] and is_refused:
                raise problem(
                    f"{unfinished}: nothing was dropped. Let them drain, or cancel them "
                    "(callqueue_cancel --all); --force drops them"
                )
            if options["yes"]:
                _drop(using, plan)
        self.say(f"{'dropped from' if options['yes'] else 'would drop from'} {using}:")
        for line in what:
            self.say(f"  {line}")
        self.say('then take "callqueue" out of your project, by hand: docs/how-to/upgrade.md')
        for place in _places_left_to_owner():
            self.say(f"  {place}")
        if not options["yes"]:
            if is_refused:
                self.say(f"{unfinished}: --yes refuses, unless with --force")
            self.say("nothing was changed: --yes drops it")


def _read_plan(using: str) -> Plan:
    there = database.existing_tables(using, _own_tables())
    unfinished = 0
    if tables.CallQueue._meta.db_table in there:
        unfinished = tables.calls(using).filter(status__in=states.UNFINISHED).count()
    return Plan(
        there,
        database.foreign_keys_to(using, there),
        _rows_about_callqueue(using),
        periodic.names_of_written_rows(),
        unfinished,
    )


def _rows_about_callqueue(using: str) -> dict[str, QuerySet[Any]]:
    """Rows that are about callqueue alone. Content types stay: rows of others name them."""
    found: dict[str, QuerySet[Any]] = {}
    recorder = MigrationRecorder(connections[using])
    if recorder.has_table():
        found["row of django_migrations"] = recorder.migration_qs.filter(app="callqueue")
    if apps.is_installed("django.contrib.auth"):
        permissions = apps.get_model("auth", "Permission").objects.using(using)
        if database.existing_tables(using, [permissions.model._meta.db_table]):
            found["permission"] = permissions.filter(content_type__app_label="callqueue")
    return found


def _drop(using: str, plan: Plan) -> None:
    """Drop all, or nothing where a database can. Fails if another app points at a permission."""
    for name, found in plan.rows.items():
        pks = list(found.values_list("pk", flat=True))
        for grants in _grant_models() if name == "permission" else ():
            grants._base_manager.using(using).filter(permission__in=pks).delete()
        found.model._base_manager.using(using).filter(pk__in=pks)._raw_delete(using)
    periodic.remove_rows(plan.periodic_tasks)
    database.drop_tables(using, plan.tables)


def _grant_models() -> list[Any]:
    users = getattr(get_user_model(), "user_permissions", None)
    group = apps.get_model("auth", "Group")
    return [one.through for one in (group.permissions, users) if one is not None]


def _places_left_to_owner() -> list[str]:
    """The host's models and old migrations that name callqueue: their owner must change them."""
    models = [
        f"the model {field.model._meta.label}: its field {field.name}"
        for model in apps.get_app_config("callqueue").get_models()
        for field in (relation.field for relation in model._meta.related_objects)
        if field.model._meta.app_label != "callqueue"
    ]
    known = MigrationLoader(None, ignore_no_migrations=True).disk_migrations
    migrations = [
        f"the migration {app}.{name}: its dependency on callqueue, and its fields that point at it"
        for (app, name), found in known.items()
        if app != "callqueue"
        if any(node[0] == "callqueue" for node in (*found.dependencies, *found.run_before))
    ]
    return sorted(models) + sorted(migrations)


def _own_tables() -> list[str]:
    return [model._meta.db_table for model in apps.get_app_config("callqueue").get_models()]


def _plan_in_lines(plan: Plan) -> list[str]:
    lines = [
        f"the foreign key {key.table.translate(QUOTES)}.{key.columns} to {key.target}"
        " (the column stays)"
        for key in plan.foreign_keys
    ]
    rows = {noun: sorted(map(_name_of_row, found)) for noun, found in plan.rows.items()}
    for noun, names in {"table": plan.tables, **rows, "periodic task": plan.periodic_tasks}.items():
        if names:
            first, of, rest = noun.partition(" of ")
            lines.append(f"{with_noun(len(names), first)}{of}{rest}: {', '.join(names)}")
    return lines or ["nothing"]


def _name_of_row(row: Any) -> str:
    return str(getattr(row, "codename", None) or row.name)
