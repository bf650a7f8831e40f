"""What nobody but the project's owner can do, once callqueue's tables are gone: models and old
migrations that name it.

In: the models and migrations of the installed apps. Out: lines, each with a place and what to
write there. The columns stay what they are, under the same names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from django.apps import apps
from django.db.migrations import operations
from django.db.migrations.loader import MigrationLoader

OURS = "callqueue"


def lines() -> list[str]:
    """In the order of files: models first."""
    return [*_in_models(), *_in_migrations()]


def _in_models() -> Iterator[str]:
    for model in apps.get_models():
        if model._meta.app_label == OURS:
            continue
        for field in [*model._meta.local_fields, *model._meta.local_many_to_many]:
            if _points_at_us(field):
                place = f"{inspect.getsourcefile(model)}, {model.__name__}.{field.name}"
                yield f"{place}: {_instead(field)}"


def _in_migrations() -> Iterator[str]:
    loader = MigrationLoader(None, ignore_no_migrations=True)
    for (app, _), migration in sorted(loader.disk_migrations.items()):
        if app == OURS:
            continue
        path = inspect.getsourcefile(sys.modules[migration.__module__])
        for name in ("dependencies", "run_before"):
            for node in getattr(migration, name):
                if node[0] == OURS:
                    yield f"{path}, {name}: take out {tuple(node)!r}"
        for operation in _all(migration.operations):
            for model, field in _fields(operation):
                if _points_at_us(field):
                    kind = type(operation).__name__
                    yield f"{path}, {kind} {model}.{field.name}: {_instead(field)}"


def _all(some: Iterable[Any]) -> Iterator[Any]:
    for operation in some:
        yield operation
        if isinstance(operation, operations.SeparateDatabaseAndState):
            yield from _all([*operation.state_operations, *operation.database_operations])


def _fields(operation: Any) -> Iterator[tuple[str, Any]]:
    """The fields of an operation, which know their names here."""
    if isinstance(operation, operations.CreateModel):
        named = operation.fields
    elif isinstance(operation, operations.AddField | operations.AlterField):
        named = [(operation.name, operation.field)]
    else:
        return
    for name, field in named:
        field = field.clone()
        field.set_attributes_from_name(name)
        yield getattr(operation, "model_name", getattr(operation, "name", "")), field


def _points_at_us(field: Any) -> bool:
    return _target(field).lower().startswith(f"{OURS}.")


def _target(field: Any) -> str:
    target = getattr(field.remote_field, "model", "")
    return target if isinstance(target, str) else target._meta.label


def _instead(field: Any) -> str:
    """The column's own field: as it is now, but for what it points at."""
    if field.many_to_many:
        return "take it out; its table and rows stay in the database"
    pointed_at = apps.get_model(_target(field))._meta
    there = pointed_at.get_field(field.remote_field.field_name or pointed_at.pk.name)
    kind = there.get_internal_type().replace("AutoField", "IntegerField")
    options = [f'db_column="{field.db_column or field.attname}"']
    options += [f"max_length={there.max_length}"] if kind == "CharField" else []
    for name in ("primary_key", "unique", "db_index"):
        if getattr(field, name):
            options.append(f"{name}=True")
            break
    # as Django writes a primary key in a migration
    options += ["serialize=False"] if field.primary_key else []
    options += [f"{name}=True" for name in ("null", "blank") if getattr(field, name)]
    return f"write models.{kind}({', '.join(options)})"
