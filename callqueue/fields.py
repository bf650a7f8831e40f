"""Columns that are encrypted at rest when ENCRYPTION_KEYS are set, and plain JSON or text when not.

A value that no key opens any more is read as UNREADABLE, so that one bad row never stops a query.
"""

from __future__ import annotations

import json
from typing import Any

from django.db import models

from callqueue import conf

SEALED = "$sealed"
UNREADABLE = {"$unreadable": "no key in ENCRYPTION_KEYS opens this value"}


class SealedJSONField(models.JSONField):
    """JSON, stored as {"$sealed": token} when there are keys."""

    def db_type(self, connection: Any) -> str | None:
        # MariaDB's own check of its JSON columns refuses what is nested 32 deep; send allows 64.
        return "longtext" if connection.vendor == "mysql" else super().db_type(connection)

    def db_check(self, connection: Any) -> str | None:
        return None if connection.vendor == "mysql" else super().db_check(connection)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        keys = conf.current().encryption_keys
        if keys and value is not None and not hasattr(value, "as_sql"):
            from callqueue.encryption import seal

            value = {SEALED: seal(json.dumps(value, separators=(",", ":")), keys)}
        return super().get_db_prep_value(value, connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        value = super().from_db_value(value, expression, connection)
        if isinstance(value, dict) and SEALED in value and len(value) == 1:
            opened = _opened(value[SEALED])
            return UNREADABLE if opened is None else json.loads(opened)
        return value


class SealedTextField(models.TextField):  # type: ignore[type-arg]
    """Text, stored as "$sealed:token" when there are keys."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        keys = conf.current().encryption_keys
        if keys and isinstance(value, str) and value:
            from callqueue.encryption import seal

            value = f"{SEALED}:{seal(value, keys)}"
        return super().get_db_prep_value(value, connection, prepared)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        if isinstance(value, str) and value.startswith(f"{SEALED}:"):
            opened = _opened(value[len(SEALED) + 1 :])
            return UNREADABLE["$unreadable"] if opened is None else opened
        return value


def _opened(token: str) -> str | None:
    from callqueue.encryption import EncryptionUnavailable, Unreadable, open_sealed

    try:
        return open_sealed(token, conf.current().encryption_keys)
    except (Unreadable, EncryptionUnavailable):
        return None


def one_call() -> int:
    """The cost of a call for which nobody stated one: Django wants a callable as a JSON field's default."""
    return 1
