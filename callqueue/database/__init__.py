"""The only place that knows database vendors. It imports no driver."""

# ruff: noqa: F401
# mypy: implicit-reexport

from callqueue.database.bulk import (
    delete_each,
    insert_each,
    insert_objects,
    new_object,
    object_from_row,
    update_each,
    update_free,
)
from callqueue.database.connections import (
    close_all,
    close_failed,
    close_kept,
    is_standby,
    is_still_usable,
    is_transient,
    kept_connection,
    persist,
    raw_connection,
    set_connect_timeout,
)
from callqueue.database.notify import (
    TOLD,
    can_listen,
    lower_flag,
    raise_flag,
    set_listening,
    wait_for_notification,
)
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
    part_sql,
    to_us,
)
from callqueue.database.statements import (
    Columns,
    again_after_deadlock,
    begins_with,
    dialect,
    distinct_pairs_sql,
    first_ids_of_each,
    idle_timeout_sql,
    in_any_transaction,
    in_transaction,
    index_scans,
    is_mysql,
    is_nested,
    is_sqlite,
    json_number_sql,
    json_value,
    lazy_commit_sql,
    listed,
    lock_ids_if_free_sql,
    locked,
    next_distinct,
    one_snapshot,
    placeholders,
    quoted,
    rows,
    run,
    set_idle_timeout,
    skip_locked_sql,
    union_all,
    writing,
)
from callqueue.database.upkeep import (
    ForeignKey,
    drop_tables,
    existing_tables,
    foreign_keys_to,
    lock_tables,
    vacuum,
)
