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
    set_connect_timeout,
    is_standby,
    is_still_usable,
    is_transient,
    kept_connection,
    persist,
    raw_connection,
)
from callqueue.database.notify import (
    TOLD,
    can_listen,
    set_listening,
    lower_flag,
    raise_flag,
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
    by_index,
    dialect,
    distinct_next,
    distinct_pairs,
    end_if_silent,
    first_of_each,
    free_ids,
    in_any_transaction,
    in_transaction,
    is_mysql,
    is_nested,
    is_sqlite,
    json_number_sql,
    listed,
    loaded,
    locked,
    locking,
    of_each,
    one_view,
    placeholders,
    quoted,
    rows,
    run,
    skip_locked,
    within_idle_seconds,
    without_waiting_for_disk,
    writing,
)
from callqueue.database.upkeep import (
    ForeignKey,
    drop,
    existing,
    foreign_keys_to,
    lock_whole,
    vacuum,
)
