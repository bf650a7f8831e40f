"""What `send` accepts: checks of call_data and of send's other arguments, before anything is
written.

Python values enter; plain JSON values leave, or InvalidCall (naming the field) or NotAllowed. No
database, no clock and no network is asked; names are resolved and checked again in the worker. An
error never repeats a value, which may be secret: it names the path and the reason.
"""

# ruff: noqa: F401
# mypy: implicit-reexport

from callqueue.sending.validation.call_data import (
    ELSEWHERE,
    EMAIL_PARAMS,
    HTTP_PARAMS,
    TASK_PARAMS,
    Reach,
    check_call_data,
    check_params,
    check_url,
)
from callqueue.sending.validation.values import (
    MAX_DEPTH,
    MAX_TEXT,
    check_callback,
    check_cost,
    check_instant,
    check_key,
    check_priority,
    check_times,
    check_unique_key,
)
