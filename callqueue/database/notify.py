"""PostgreSQL's LISTEN and NOTIFY: inserted calls wake a dispenser that sleeps.

An idle dispenser holds an advisory lock, its flag. While no flag is up, senders notify nobody, and
pay for one shared lock a statement. Permits wake nobody: their own processes make their passes.
"""

from __future__ import annotations

import selectors
from typing import Any

from django.db import connections

from callqueue.database.statements import is_postgresql, rows, run
from callqueue.states import PERMIT

CHANNEL = "callqueue_sent"
TOLD = 8  # rules that a statement's notification names; where it sent calls of more, it names none
_FLAG = 6_015_403_886_170_112_257  # the lock's number, which nobody else will choose
WAKE = (
    f"""CREATE OR REPLACE FUNCTION callqueue_wake() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        rules text[];
    BEGIN
        IF NOT pg_try_advisory_xact_lock_shared({_FLAG}) THEN
            rules := ARRAY(SELECT DISTINCT rule FROM sent WHERE ready
                AND method <> '{PERMIT}' LIMIT {TOLD + 1});
            IF cardinality(rules) > {TOLD} THEN rules := ARRAY['']; END IF;
            PERFORM pg_notify('{CHANNEL}', rule) FROM unnest(rules) AS rule;
        END IF;
        RETURN NULL;
    END $$""",
    "DROP TRIGGER IF EXISTS callqueue_wake ON callqueue_callqueue",
    "CREATE TRIGGER callqueue_wake AFTER INSERT ON callqueue_callqueue"
    " REFERENCING NEW TABLE AS sent FOR EACH STATEMENT EXECUTE FUNCTION callqueue_wake()",
)
SILENCE = (
    "DROP TRIGGER IF EXISTS callqueue_wake ON callqueue_callqueue",
    "DROP FUNCTION IF EXISTS callqueue_wake()",
)


def can_listen(using: str) -> bool:
    """Whether LISTEN works here: connected, to PostgreSQL, in no transaction, behind no pooler."""
    connection = connections[using]
    raw = connection.connection
    if not is_postgresql(using) or connection.in_atomic_block or raw is None:
        return False
    # A pooler lends us another session each time.
    return bool(rows(using, "SELECT pg_backend_pid()")[0][0] == raw.info.backend_pid)


def set_listening(using: str, is_wanted: bool) -> None:
    run(using, f"{'LISTEN' if is_wanted else 'UNLISTEN'} {CHANNEL}")


def raise_flag(using: str) -> bool:
    """From now on senders notify. False where another flag is up, or a sender has not committed."""
    return bool(rows(using, f"SELECT pg_try_advisory_lock({_FLAG})")[0][0])


def lower_flag(using: str) -> None:
    """From now on senders are silent."""
    rows(using, f"SELECT pg_advisory_unlock({_FLAG})")


def wait_for_notification(using: str, seconds: float) -> set[str]:
    """Wait so long for senders: the rules that they named, "" for any; empty: none notified."""
    raw = connections[using].connection
    with connections[using].wrap_database_errors:
        if came_before := _take_notifications(raw):
            return came_before
        with selectors.DefaultSelector() as selector:
            selector.register(raw.fileno(), selectors.EVENT_READ)
            if not selector.select(seconds):
                return set()
        if not callable(raw.notifies):  # psycopg 2
            raw.poll()
        return _take_notifications(raw) or {""}


def _take_notifications(raw: Any) -> set[str]:
    # They may have come along with a statement's answer: to wait for more to read would miss them.
    if callable(raw.notifies):  # psycopg 3
        return {word.payload for word in raw.notifies(timeout=0)}
    said = {word.payload for word in raw.notifies}
    del raw.notifies[:]
    return said
