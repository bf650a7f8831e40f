"""Columns encrypted at rest where ENCRYPTION_KEYS are set, and columns that keep what others say.

What is sealed is bound to its column and its row: what no key opens there is read as UNREADABLE, so
that one bad row never stops a query. What is not sealed never looks as if it were. What providers,
hooks and errors say is made storable here.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from callqueue import conf, database, texts
from callqueue.security.secrets import MARK, mark_secrets, unmark_secrets

SEALED = "$sealed"
PLAIN = "$plain"  # before what is not sealed, and looks as one of these do
_ROW = "$row:"  # before what is read together with its row's identity
UNREADABLE = {"$unreadable": "no key in ENCRYPTION_KEYS opens this value"}


@dataclass(frozen=True)
class Bound:  # what is to be sealed, and its row's identity
    value: Any = field(repr=False)
    row: str


class ToldTextField(models.TextField):  # type: ignore[type-arg]
    """Text that others say, in the nearest form that every database keeps."""

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        return super().get_db_prep_save(texts.storable_json(value), connection)

    def value_in_json(self, value: Any) -> Any:
        """The value as it stands in a JSON document, all of which its writer makes storable."""
        return value


class _Sealed(models.TextField):  # type: ignore[type-arg]
    """Text, "$sealed:token" where there are keys. `bound_to`: the column of the row's identity."""

    unreadable: Any

    def __init__(self, *args: Any, bound_to: str = "id", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bound_to = bound_to

    def to_text(self, value: Any) -> str:
        raise NotImplementedError

    def from_text(self, text: str) -> Any:
        raise NotImplementedError

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return self.bind_row(
            super().pre_save(model_instance, add), getattr(model_instance, self.bound_to)
        )

    def bind_row(self, value: Any, row: Any) -> Any:
        """With its row's identity, as `update` wants it; as it is where nothing is to be sealed."""
        is_data = (
            conf.current().encryption_keys
            and value not in (None, "")
            and not hasattr(value, "as_sql")
        )
        return Bound(value, _row_identity(row)) if is_data and row is not None else value

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Where there are keys, Django selects the column together with its row's identity."""
        table, dot, column = sql.rpartition(".")
        own = compiler.connection.ops.quote_name(self.column)
        if column != own or not dot or not conf.current().encryption_keys:
            return super().select_format(compiler, sql, params)
        return self.selected_sql(compiler.connection, table), params

    def selected_sql(self, connection: Any, table: str) -> str:
        """SQL of the column, read together with its row's identity."""
        quote, bound_to = connection.ops.quote_name, self.model._meta.get_field(self.bound_to)
        identity = f"{table}.{quote(bound_to.column)}"  # type: ignore[union-attr]
        value = f"{table}.{quote(self.column)}"
        joined = database.dialect(connection.alias).joined
        return joined.format(f"'{_ROW}'", identity, "'|'", value)

    def get_prep_value(self, value: Any) -> Any:
        return value

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        return self.sealed_or_plain(value)

    def value_in_json(self, value: Any) -> Any:
        return self.sealed_or_plain(value)

    def sealed_or_plain(self, value: Any) -> Any:
        """Sealed where there are keys; and never looking as if it were, where there are none."""
        data = value.value if isinstance(value, Bound) else value
        if data is None or hasattr(data, "as_sql"):
            return data
        text, keys = self.to_text(data), conf.current().encryption_keys
        if not text or not keys:
            return f"{PLAIN}:{text}" if text.startswith((SEALED, PLAIN, _ROW)) else text
        from callqueue.security.encryption import seal

        row = value.row if isinstance(value, Bound) else ""
        return f"{SEALED}:{seal(text, keys, place=self.place, row=row)}"

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        row, text = _split_row_identity(value)
        if text is None:
            return None
        if not text.startswith(f"{SEALED}:"):
            return self.from_text(text.removeprefix(f"{PLAIN}:"))
        opened = self.decrypted(text[len(SEALED) + 1 :], row)
        return self.unreadable if opened is None else self.from_text(opened)

    def decrypted(self, token: str, row: str) -> str | None:
        """The token's text; None where no key opens it here. `row`: "" if it was read without."""
        from callqueue.security.encryption import EncryptionUnavailable, Unreadable, open_sealed

        try:
            return open_sealed(token, conf.current().encryption_keys, place=self.place, row=row)
        except (Unreadable, EncryptionUnavailable):
            return None

    def formfield(self, **_: Any) -> None:
        """None: forms leave it out. They would show it as Python's repr, and save that."""

    @property
    def place(self) -> str:
        return f"{self.model._meta.db_table}.{self.column}"


class SealedJSONField(_Sealed):
    """JSON as text: names keep their order, numbers their form. Secrets are stored by name."""

    unreadable = UNREADABLE
    _pyi_private_get_type: Any
    _pyi_private_set_type: Any

    def to_text(self, value: Any) -> str:
        return json.dumps(
            mark_secrets(value) if _may_hold_secrets(value) else value, separators=(",", ":")
        )

    def from_text(self, text: str) -> Any:
        try:
            return unmark_secrets(json.loads(text)) if MARK in text else json.loads(text)
        except (ValueError, RecursionError):  # something else has written this
            return UNREADABLE

    def value_to_string(self, obj: Any) -> Any:
        return self.to_text(self.value_from_object(obj))

    def to_python(self, value: Any) -> Any:
        read = self.from_text(value) if isinstance(value, str) else value
        if read is UNREADABLE:  # stored, it would replace what is to be stored
            why = models.JSONField.default_error_messages["invalid"]
            raise ValidationError(why, code="invalid")
        return read


class ToldJSONField(SealedJSONField):
    """JSON that others say, sealed, in the nearest form that every database keeps."""

    def to_text(self, value: Any) -> str:
        text = super().to_text(value)
        if "\\u0000" in text or "\\ud" in text:  # to look is cheaper than to change every text
            return super().to_text(texts.storable_json(value))
        return text


class SealedTextField(_Sealed):
    """Text that others say, sealed, in the nearest form that every database keeps."""

    unreadable = UNREADABLE["$unreadable"]

    def to_text(self, value: Any) -> str:
        return texts.storable(str(value))

    def from_text(self, text: str) -> Any:
        return text


def new_idempotency_key() -> uuid.UUID:
    """A UUID of version 7: 74 bits are random, and an index gets those of one time side by side."""
    made = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    return uuid.UUID(int=made & ~(0xF << 76 | 0x3 << 62) | 0x7 << 76 | 0x2 << 62)


def one_call() -> int:
    return 1


def _may_hold_secrets(value: Any) -> bool:
    """Whether it may hold Secrets, or names like their marks: a repr takes half of json's time."""
    text = repr(value)
    return MARK in text or "Secret(" in text


def _row_identity(row: Any) -> str:
    return str(row).replace("-", "")  # a UUID comes with dashes from some databases only


def _split_row_identity(value: Any) -> tuple[str, Any]:
    if not isinstance(value, str) or not value.startswith(_ROW):
        return "", value  # read without
    row, _, rest = value[len(_ROW) :].partition("|")
    return _row_identity(row), rest
