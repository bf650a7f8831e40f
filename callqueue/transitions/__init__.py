"""Every move of a call from one state to another, and every end of an attempt.

`attempt_ends` says what the end of an attempt makes of its call; `recording` and `deferred` write
that; `moves` makes all other moves. Which are legal, `states.Move` says: the moves take their
conditions from it.
"""

# ruff: noqa: F401
# mypy: implicit-reexport

from callqueue.transitions.attempt_ends import (
    STALE,
    after_expiry,
    after_failure,
    after_giving_up,
    after_loss,
    after_success,
    after_throttle,
    after_unfitness,
    after_void,
    is_key_stale,
)
from callqueue.transitions.deferred import end_deferred
from callqueue.transitions.job import LONGEST_MESSAGE, Job, Result
from callqueue.transitions.moves import (
    cancel,
    dispatch,
    end_overdue,
    fail,
    requeue,
    send_again,
    settle,
    undo,
    undo_released,
    void,
    void_permits,
)
from callqueue.transitions.recording import astray, end_attempts, end_calls, lose
