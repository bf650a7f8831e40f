"""The only place that knows database vendors: PostgreSQL, MariaDB, MySQL and SQLite behave alike
behind these functions. It imports no driver.
"""

# ruff: noqa: F401
# mypy: implicit-reexport

from callqueue.database.bulk_insert import (
    insert_each,
    insert_objects,
    new_object,
)
from callqueue.database.bulk_update import delete_each, update_each, update_free
from callqueue.database.connections import (
    answers,
    close_all,
    close_failed,
    close_kept,
    connect_within,
    is_standby,
    kept_connection,
    may_pass,
    persist,
    raw_connection,
)
from callqueue.database.dropping import ForeignKey, drop, existing, foreign_keys_to, lock_whole
from callqueue.database.index_scans import begins_with, distinct_next, first_of_each, pairs_next
from callqueue.database.notify import (
    TOLD,
    lower_flag,
    raise_flag,
    start_listening,
    stop_listening,
    wait_for_word,
)
from callqueue.database.row_locks import free_ids, locked, locking, sharing, skip_locked
from callqueue.database.schema import finish_tables, unfinish_tables
from callqueue.database.server_clock import (
    EPOCH,
    MICROSECOND,
    ClockNow,
    as_parameter,
    clock,
    clock_sql,
    from_us,
    instant_us,
    micros_sql,
    slot_sql,
    to_us,
)
from callqueue.database.statements import (
    Columns,
    is_mysql,
    joined_sql,
    json_number_sql,
    listed,
    loaded,
    places,
    position_sql,
    quoted,
    rows,
    run,
)
from callqueue.database.table_statistics import (
    analyze_changed,
    dead_rows,
    estimated_rows,
)
from callqueue.database.transactions import (
    again_after_deadlock,
    in_any_transaction,
    in_transaction,
    is_nested,
    lazily_sql,
    one_view,
    within_idle_seconds,
    without_waiting_for_disk,
    writing,
)
from callqueue.database.vacuuming import vacuum, vacuum_progress
