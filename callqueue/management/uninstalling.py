"""Leaving: what belongs to callqueue in a database, and dropping it.

In: a database. Out: a Plan. Whatever another app has stays: its rows and columns, and so content
types and permissions that they point at. What is left to do by hand is in `left_by_hand`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import ForeignObjectRel, Model, QuerySet

from callqueue import database, states, tables
from callqueue.maintenance import periodic


@dataclass(frozen=True)
class Plan:
    """What is to be dropped, as names."""

    tables: list[str]
    foreign_keys: list[database.ForeignKey]
    migrations: list[str]
    permissions: list[str]
    content_types: list[str]
    kept: list[str]  # content types and permissions, each with what points at it
    periodic_tasks: list[str]
    unfinished: int


class Unfinished(Exception):
    """Calls are not finished."""


@dataclass
class _Described:
    """Rows of django.contrib that describe callqueue in one database."""

    migrations: list[Any]
    permissions: list[Any]
    content_types: list[Any]
    kept: list[str]


def plan(using: str) -> Plan:
    """Look, and change nothing."""
    there = database.existing(using, _tables())
    of_all = [_described(alias) for alias in _aliases(using)]
    return Plan(
        tables=there,
        foreign_keys=database.foreign_keys_to(using, there),
        migrations=[row.name for one in of_all for row in one.migrations],
        permissions=[row.codename for one in of_all for row in one.permissions],
        content_types=[row.model for one in of_all for row in one.content_types],
        kept=[text for one in of_all for text in one.kept],
        periodic_tasks=periodic.written(),
        unfinished=_unfinished(using, there),
    )


def uninstall(using: str, *, force: bool = False) -> None:
    """Drop what `plan` says; all of it or nothing, where a database can do that with tables.

    Unfinished where calls are, unless `force`. May be run again after it failed.
    """
    with transaction.atomic(using=using):
        there = database.existing(using, _tables())
        database.lock_whole(using, there)
        if _unfinished(using, there) and not force:
            raise Unfinished
        database.drop(using, there)
        periodic.remove(periodic.written())
        for alias in _aliases(using):
            one = _described(alias)
            for row in [*one.migrations, *one.permissions, *one.content_types]:
                row.delete(using=alias)


def _tables() -> list[str]:
    return [model._meta.db_table for model in apps.get_app_config("callqueue").get_models()]


def _unfinished(using: str, there: Collection[str]) -> int:
    if "callqueue_callqueue" not in there:
        return 0
    return tables.calls(using).filter(status__in=states.UNFINISHED).count()


def _aliases(using: str) -> list[str]:
    """The database, and the default one, where Django describes apps too, if that has no tables of
    callqueue's of its own.
    """
    if using == DEFAULT_DB_ALIAS or database.existing(DEFAULT_DB_ALIAS, _tables()):
        return [using]
    return [using, DEFAULT_DB_ALIAS]


def _described(alias: str) -> _Described:
    recorder = MigrationRecorder(connections[alias])
    found = _Described([], [], [], [])
    if recorder.has_table():
        found.migrations = list(recorder.migration_qs.filter(app="callqueue").order_by("id"))
    if apps.is_installed("django.contrib.contenttypes"):
        _find_types(alias, found)
    return found


def _find_types(alias: str, found: _Described) -> None:
    from django.contrib.contenttypes.models import ContentType

    if not _is_there(alias, ContentType):
        return
    permissions = _permissions(alias)
    for one in ContentType.objects.using(alias).filter(app_label="callqueue").order_by("model"):
        pointing = _pointing_at(one, _of_auth(with_permissions=True))
        for permission in permissions.filter(content_type=one) if permissions else ():
            if others := _pointing_at(permission, _of_auth(with_permissions=False)):
                pointing.append(f"permission {permission.codename}, at which {others[0]} point")
            else:
                found.permissions.append(permission)
        if pointing:
            found.kept.append(f"the content type {one.model}: {', '.join(pointing)} point at it")
        else:
            found.content_types.append(one)


def _permissions(alias: str) -> QuerySet[Any] | None:
    if not apps.is_installed("django.contrib.auth"):
        return None
    from django.contrib.auth.models import Permission

    return Permission.objects.using(alias).order_by("codename")


def _of_auth(*, with_permissions: bool) -> set[Any]:
    """What goes with a permission: that somebody has it. (And with a content type: permissions.)"""
    if not apps.is_installed("django.contrib.auth"):
        return set()
    from django.contrib.auth import get_user_model
    from django.contrib.auth.models import Group, Permission

    users = getattr(get_user_model(), "user_permissions", None)
    granted = {Group.permissions.through, getattr(users, "through", None)}
    return {*granted, Permission} if with_permissions else granted


def _pointing_at(row: Model, but_for: Collection[Any]) -> list[str]:
    """How many rows of which models have foreign keys to this one: "3 of admin.LogEntry"."""
    found, alias = [], str(row._state.db)
    for relation in row._meta.get_fields(include_hidden=True):
        if not isinstance(relation, ForeignObjectRel) or relation.many_to_many:
            continue
        model: Any = relation.related_model
        if model in but_for or not _is_there(alias, model):
            continue
        rows = model._base_manager.using(alias).filter(**{relation.field.name: row})
        if count := rows.count():
            found.append(f"{count} of {model._meta.label}")
    return found


def _is_there(alias: str, model: Any) -> bool:
    return bool(database.existing(alias, [model._meta.db_table]))
