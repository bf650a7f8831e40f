"""Every move of a call between states, as `states.Move` allows, and every end of an attempt."""

# ruff: noqa: F401
# mypy: implicit-reexport

from callqueue.transitions.ends import (
    LONGEST_MESSAGE,
    STALE,
    Job,
    Result,
    after_expiry,
    after_failure,
    after_giving_up,
    after_loss,
    after_success,
    after_throttle,
    after_void,
    is_key_stale,
)
from callqueue.transitions.verbs import (
    begin,
    cancel,
    clock_correction,
    end_deferred,
    end_unchanged,
    end_unknown,
    fail,
    lose,
    owes_announcement,
    record,
    release,
    requeue,
    requeue_unknown,
    tell_when_sent,
    void,
    void_and_log,
    void_begun,
    void_released,
)
