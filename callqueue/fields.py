"""Columns that are encrypted at rest when ENCRYPTION_KEYS are set, and columns that keep what
others say.

What is sealed is bound to its column and its row: moved to another, it opens no more than what no
key opens, and both are read as UNREADABLE, so that one bad row never stops a query. What is not
sealed never looks as if it were. What providers, hooks and errors say is made storable here,
whoever writes it: none of it is refused by a database.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from django.db import models

from callqueue import conf, database, texts
from callqueue.security.secrets import MARK, marked, unmarked

SEALED = "$sealed"
PLAIN = "$plain"  # before what is not sealed, and looks as one of these do
_ROW = "$row:"  # before what is read together with its row's identity
UNREADABLE = {"$unreadable": "no key in ENCRYPTION_KEYS opens this value"}


@dataclass(frozen=True)
class Bound:
    """A value that is written into the row of this identity. A value that is not wrapped in this is
    bound to its column alone.
    """

    value: Any
    row: str


class _Told(models.Field):  # type: ignore[type-arg]
    """What others say, in the nearest form that every database keeps."""

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        if isinstance(value, Bound):
            return super().get_db_prep_save(
                Bound(texts.storable_json(value.value), value.row), connection
            )
        return super().get_db_prep_save(texts.storable_json(value), connection)


class ToldTextField(_Told, models.TextField):  # type: ignore[type-arg]
    """Text that others say. To migrations it is Django's own: the column is no other."""

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.TextField", args, kwargs


class _Sealed(models.Field):  # type: ignore[type-arg]
    """What the two kinds of encrypted column share. `bound_to` is the column that tells rows apart,
    and is known when they are inserted.
    """

    def __init__(self, *args: Any, bound_to: str = "id", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bound_to = bound_to

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return self.bound(
            super().pre_save(model_instance, add), getattr(model_instance, self.bound_to)
        )

    def bound(self, value: Any, row: Any) -> Any:
        """The value for the row of this identity, as it is to be given to `update` and the like."""
        is_data = (
            conf.current().encryption_keys
            and value not in (None, "")
            and not hasattr(value, "as_sql")
        )
        return Bound(value, _identity(row)) if is_data and row is not None else value

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Where there are keys, what Django selects is the column together with its row's
        identity.
        """
        table, dot, column = sql.rpartition(".")
        own = compiler.connection.ops.quote_name(self.column)
        if column != own or not dot or not conf.current().encryption_keys:
            return super().select_format(compiler, sql, params)
        return self.selected(compiler.connection, table), params

    def selected(self, connection: Any, table: str) -> str:
        """The SQL that reads the column of this table with its row's identity."""
        quote, bound_to = connection.ops.quote_name, self.model._meta.get_field(self.bound_to)
        identity = f"{table}.{quote(bound_to.column)}"  # type: ignore[union-attr]
        return database.joined_sql(
            connection, f"'{_ROW}'", identity, "'|'", f"{table}.{quote(self.column)}"
        )

    def sealed(self, value: Any, text: str, keys: Any) -> str:
        """The text as a token, bound to the column and to the row that the value was bound to."""
        from callqueue.security.encryption import seal

        return seal(text, keys, place=self.place, row=value.row if isinstance(value, Bound) else "")

    def opened(self, token: Any, row: str | None) -> str | None:
        """What the token holds; None where no key opens it here. `row` is None where the value was
        read without its row's identity.
        """
        from callqueue.security.encryption import EncryptionUnavailable, Unreadable, open_sealed

        try:
            return open_sealed(
                token, conf.current().encryption_keys, place=self.place, row=row or ""
            )
        except (Unreadable, EncryptionUnavailable):
            return None

    @property
    def place(self) -> str:
        return f"{self.model._meta.db_table}.{self.column}"


class SealedJSONField(_Sealed, models.JSONField):
    """JSON, stored as {"$sealed": token} when there are keys; secrets are stored by name, see
    callqueue.security.secrets.
    """

    def db_type(self, connection: Any) -> str | None:
        # MariaDB's own check of its JSON columns refuses what is nested 32 deep; send allows 64.
        return "longtext" if database.is_mysql(connection.alias) else super().db_type(connection)

    def db_check(self, connection: Any) -> str | None:
        return None if database.is_mysql(connection.alias) else super().db_check(connection)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        data = value.value if isinstance(value, Bound) else value
        if data is not None and not hasattr(data, "as_sql"):
            keys = conf.current().encryption_keys
            data = marked(data) if _has_marks(data) else data
            if keys:
                data = {SEALED: self.sealed(value, json.dumps(data, separators=(",", ":")), keys)}
            elif isinstance(data, dict) and len(data) == 1 and data.keys() & {SEALED, PLAIN}:
                data = {PLAIN: data}
        return super().get_db_prep_value(data, connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        row, value = _with_row(value)
        has_marks = not isinstance(value, str) or MARK in value
        value = super().from_db_value(value, expression, connection)
        if isinstance(value, dict) and len(value) == 1:
            if SEALED in value:
                text = self.opened(value[SEALED], row)
                value, has_marks = (
                    (UNREADABLE, False) if text is None else (json.loads(text), MARK in text)
                )
            elif PLAIN in value:
                value = value[PLAIN]
        return _unmarked(value) if has_marks else value

    def value_to_string(self, obj: Any) -> Any:
        """For dumpdata: as it is, or as the text of what is stored where there are secrets, which
        JSON has no form for.
        """
        value = self.value_from_object(obj)
        return json.dumps(marked(value)) if _has_marks(value) else value

    def to_python(self, value: Any) -> Any:
        """For loaddata, which gives back that text."""
        try:
            return unmarked(json.loads(value)) if isinstance(value, str) else value
        except ValueError:
            return value


class ToldJSONField(_Told, SealedJSONField):
    """JSON that others say. To migrations it is a SealedJSONField: the column is no other."""

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "callqueue.fields.SealedJSONField", args, kwargs


class SealedTextField(_Told, _Sealed, models.TextField):  # type: ignore[type-arg]
    """Text that others say, stored as "$sealed:token" when there are keys."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        text = value.value if isinstance(value, Bound) else value
        if isinstance(text, str) and text:
            keys = conf.current().encryption_keys
            if keys:
                text = f"{SEALED}:{self.sealed(value, text, keys)}"
            elif text.startswith((SEALED, PLAIN, _ROW)):
                text = f"{PLAIN}:{text}"
        return super().get_db_prep_value(text, connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        row, value = _with_row(value)
        if isinstance(value, str):
            if value.startswith(f"{SEALED}:"):
                opened = self.opened(value[len(SEALED) + 1 :], row)
                return UNREADABLE["$unreadable"] if opened is None else opened
            return value.removeprefix(f"{PLAIN}:")
        return value


def one_call() -> int:
    """The cost of a call for which nobody stated one: Django wants a callable as a JSON field's
    default.
    """
    return 1


def _has_marks(value: Any) -> bool:
    """Whether the value may be stored otherwise than it is: it has secrets, or names like their
    marks. Reading its repr takes half of json's time.
    """
    text = repr(value)
    return MARK in text or "Secret(" in text


def _unmarked(value: Any) -> Any:
    try:
        return unmarked(value)
    except RecursionError:  # no call is nested so deep: something else has written this
        return UNREADABLE


def _identity(row: Any) -> str:
    """The identity as every database writes it: some have UUIDs with dashes."""
    return str(row).replace("-", "")


def _with_row(value: Any) -> tuple[str | None, Any]:
    """The identity of the row that a value was read with, if it was, and the value."""
    if not isinstance(value, str) or not value.startswith(_ROW):
        return None, value
    row, _, rest = value[len(_ROW) :].partition("|")
    return _identity(row), rest
