"""Columns that are encrypted at rest when ENCRYPTION_KEYS are set, and columns that keep what
others say.

What is sealed is bound to its column and its row: moved to another, it opens no more than what no
key opens, and both are read as UNREADABLE, so that one bad row never stops a query. What is not
sealed never looks as if it were. What providers, hooks and errors say is made storable here,
whoever writes it: none of it is refused by a database.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from django.db import models
from django.db.models.fields.json import JSONExact

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

    value: Any = field(repr=False)
    row: str


class _Told(models.Field):  # type: ignore[type-arg]
    """What others say, in the nearest form that every database keeps."""

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        return super().get_db_prep_save(_nearest(value), connection)

    def in_document(self, value: Any) -> Any:
        """The value as it stands in a JSON document from which a statement reads its rows. Whoever
        writes the document makes it storable; nobody can in what is sealed.
        """
        return self._stored(_nearest(value) if conf.current().encryption_keys else value)

    def _stored(self, value: Any) -> Any:
        return value


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
        """Where there are keys, Django selects the column together with its row's identity."""
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
    callqueue.security.secrets. A mapping keeps the order of its names and the form of its numbers,
    on every database.
    """

    keeps_form = True

    def db_type(self, connection: Any) -> str | None:
        # MariaDB's own check of its JSON columns refuses what is nested 32 deep; send allows 64.
        return "longtext" if database.is_mysql(connection.alias) else super().db_type(connection)

    def db_check(self, connection: Any) -> str | None:
        return None if database.is_mysql(connection.alias) else super().db_check(connection)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        return super().get_db_prep_value(self._stored(value), connection, prepared)

    def in_document(self, value: Any) -> Any:
        """The value as it stands in a JSON document from which a statement reads its rows."""
        return self._formed(self._stored(value))

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        data = self._stored(value)
        if not isinstance(data, dict):
            return super().get_db_prep_save(value, connection)
        if database.forgets_form(connection):
            data = self._formed(data)
        return super().get_db_prep_value(data, connection)

    def _formed(self, data: Any) -> Any:
        """What is stored, with a note of its form where it would be forgotten."""
        if not self.keeps_form or not isinstance(data, dict) or SEALED in data:
            return data
        return database.with_form(data)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        row, value = _with_row(value)
        has_marks = not isinstance(value, str) or MARK in value
        value = super().from_db_value(value, expression, connection)
        if self.keeps_form and isinstance(value, dict) and database.FORM in value:
            value = database.in_form(value)
        if isinstance(value, dict) and len(value) == 1:
            if SEALED in value:
                text = self.opened(value[SEALED], row)
                value, has_marks = (
                    (UNREADABLE, False) if text is None else (json.loads(text), MARK in text)
                )
            elif PLAIN in value:
                value = value[PLAIN]
        return _unmarked(value) if has_marks else value

    def _stored(self, value: Any) -> Any:
        """The value as it is stored: sealed where there are keys, and never looking as if it were
        where there are none.
        """
        data = value.value if isinstance(value, Bound) else value
        if data is None or hasattr(data, "as_sql"):
            return data
        keys = conf.current().encryption_keys
        data = marked(data) if _has_marks(data) else data
        if keys:
            return {SEALED: self.sealed(value, json.dumps(data, separators=(",", ":")), keys)}
        is_odd = isinstance(data, dict) and (
            database.FORM in data or (len(data) == 1 and data.keys() & {SEALED, PLAIN})
        )
        return {PLAIN: data} if is_odd else data

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


@SealedJSONField.register_lookup
class _Exact(JSONExact):
    """Whether the whole value is equal, in whatever order its names are."""

    def process_lhs(self, compiler: Any, connection: Any, lhs: Any = None) -> Any:
        sql, params = super().process_lhs(compiler, connection, lhs)
        return database.without_form_sql(connection, sql), params


class ToldJSONField(_Told, SealedJSONField):
    """JSON that others say. To migrations it is a SealedJSONField: the column is no other."""

    keeps_form = False
    _stored = SealedJSONField._stored

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "callqueue.fields.SealedJSONField", args, kwargs


class SealedTextField(_Told, _Sealed, models.TextField):  # type: ignore[type-arg]
    """Text that others say, stored as "$sealed:token" when there are keys."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        return super().get_db_prep_value(self._stored(value), connection, prepared)

    def _stored(self, value: Any) -> Any:
        text = value.value if isinstance(value, Bound) else value
        if not isinstance(text, str) or not text:
            return text
        if keys := conf.current().encryption_keys:
            return f"{SEALED}:{self.sealed(value, text, keys)}"
        return f"{PLAIN}:{text}" if text.startswith((SEALED, PLAIN, _ROW)) else text

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        row, value = _with_row(value)
        if isinstance(value, str):
            if value.startswith(f"{SEALED}:"):
                opened = self.opened(value[len(SEALED) + 1 :], row)
                return UNREADABLE["$unreadable"] if opened is None else opened
            return value.removeprefix(f"{PLAIN}:")
        return value


def new_idempotency_key() -> uuid.UUID:
    """A UUID of version 7: 74 bits are random, and an index gets those of one time side by side."""
    made = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    return uuid.UUID(int=made & ~(0xF << 76 | 0x3 << 62) | 0x7 << 76 | 0x2 << 62)


def one_call() -> int:
    """The cost of a call for which nobody stated one; callable, as Django wants it of JSON."""
    return 1


def _nearest(value: Any) -> Any:
    """The nearest value that every database keeps, bound to its row as before."""
    if isinstance(value, Bound):
        return Bound(texts.storable_json(value.value), value.row)
    return texts.storable_json(value)


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
