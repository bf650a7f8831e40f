"""The words of each vendor for what the others have other words for: the one place that asks which
database this is. MariaDB and MySQL speak alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from django.db import connections


@dataclass(frozen=True)
class Dialect:
    """A vendor's SQL. `{0}`, `{1}` stand for expressions, or for a number."""

    name: str
    # the clock in UTC as of this row, after it waited for the row's lock; and later by microseconds
    clock: str
    later: str
    micros: str  # of an instant since the epoch
    divided: str  # of whole numbers
    position: str  # f(text, part): where it begins, 0 where nowhere
    joined: str  # a text, a value, a text and a text as one text; NULL where one of them is
    number: str  # the whole number at a place (the parameter) in a JSON column, or NULL
    vacuum: tuple[str, ...]  # of a table, one after the other
    vacuum_full: tuple[str, ...]
    sharing: str = ""  # at the end of a SELECT: others may share its rows, and nobody may lock them
    # a column of a SELECT: the transaction's commit returns before it is on disk; and the server
    # ends the transaction once its process has been silent for so many seconds
    lazily: str = ""
    silent: str = ""

    def place(self, name: str) -> str:
        """The parameter of `number` for a name."""
        return name if self.name == "postgresql" else "$." + json.dumps(name, ensure_ascii=False)


_ALL = (
    Dialect(
        "postgresql",
        clock="CLOCK_TIMESTAMP()",
        later=" + INTERVAL '{0} microseconds'",
        micros="(DATE_PART('epoch', {0}) * 1000000)::bigint",  # EXTRACT's numeric takes longer
        divided="/",
        position="strpos",
        joined="{0} || CAST({1} AS text) || {2} || {3}",
        number="CAST({0} ->> CAST(%s AS text) AS bigint)",
        vacuum=("VACUUM (ANALYZE) {0}", "VACUUM {0}"),
        vacuum_full=("VACUUM (FULL, ANALYZE) {0}",),
        sharing=" FOR KEY SHARE",
        lazily=", set_config('synchronous_commit', 'off', true)",
        silent=", set_config('idle_in_transaction_session_timeout', '{0}s', true)",
    ),
    Dialect(
        "mysql",
        clock="UTC_TIMESTAMP(6)",
        later=" + INTERVAL {0} MICROSECOND",
        micros="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0})",
        divided="DIV",
        position="instr",
        joined="CONCAT({0}, {1}, {2}, {3})",
        number="CAST(JSON_UNQUOTE(JSON_EXTRACT({0}, %s)) AS SIGNED)",
        vacuum=("ANALYZE TABLE {0}",),
        vacuum_full=("OPTIMIZE TABLE {0}",),
        sharing=" LOCK IN SHARE MODE",
    ),
    Dialect(
        "sqlite",
        clock="NULL",  # it has milliseconds only
        later="",
        micros=(  # whole seconds come without a fraction
            "(CAST(STRFTIME('%%s', {0}) AS INTEGER) * 1000000"
            " + CAST(SUBSTR({0} || '.000000', 21, 6) AS INTEGER))"
        ),
        divided="/",
        position="instr",
        joined="{0} || CAST({1} AS text) || {2} || {3}",
        number="CAST(JSON_EXTRACT({0}, %s) AS INTEGER)",
        vacuum=("PRAGMA optimize",),
        vacuum_full=("VACUUM",),
    ),
)
_BY_VENDOR = {one.name: one for one in _ALL}


def dialect(using: str) -> Dialect:
    """That of a database that may have this app's tables. A project may have others besides, which
    the questions below are asked of, too.
    """
    return _BY_VENDOR[connections[using].vendor]


def is_postgresql(using: str) -> bool:
    """Whether the database is PostgreSQL."""
    return str(connections[using].vendor) == "postgresql"


def is_mysql(using: str) -> bool:
    """Whether the database is MariaDB or MySQL."""
    return str(connections[using].vendor) == "mysql"


def is_sqlite(using: str) -> bool:
    """Whether the database is SQLite, where one connection writes at a time."""
    return str(connections[using].vendor) == "sqlite"
