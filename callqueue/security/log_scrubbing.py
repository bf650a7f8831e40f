"""What others log while a call is made tells none of its secrets.

The secrets and the payload of the call in hand enter, for as long as a block runs; log records of
Celery and urllib3 that tell a secret, tracebacks included, are dropped meanwhile. Each thread has
its own call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from callqueue.security.withholding import clean, holds, payload_of

_LOGGERS = (
    "celery.app.trace",
    "urllib3.connection",
    "urllib3.connectionpool",
    "urllib3.response",
    "urllib3.util.retry",
    "urllib3.poolmanager",
    "requests",
)
_LONGEST = 65536  # characters of a record; one that is longer is dropped unread
_in_hand: ContextVar[tuple[tuple[str, ...], str, Any]] = ContextVar(
    "callqueue_in_hand", default=((), "", None)
)


@contextmanager
def at_work(values: tuple[str, ...], method: str = "", params: Any = None) -> Iterator[None]:
    """While the block runs, this thread makes a call with these secrets and this payload: no record
    of Celery's and urllib3's own loggers tells a secret, and `cleaned` knows what to take out.
    """
    if values:
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_tells_nothing)
    token = _in_hand.set((values, method, params))
    try:
        yield
    finally:
        _in_hand.reset(token)


def cleaned(text: str) -> str:
    """`clean` for the call that this thread makes."""
    values, method, params = _in_hand.get()
    return clean(text, values, payload_of(method, params))


def _tells_nothing(record: logging.LogRecord) -> bool:
    """Whether the record may be logged: neither its text, nor its traceback, nor what was given
    beside them tells a secret of the call in hand.
    """
    values = _in_hand.get()[0]
    if not values:
        return True
    try:
        own = logging.makeLogRecord(record.__dict__)  # formatting writes into it
        text = f"{logging.Formatter().format(own)}\n{record.__dict__}"
    except Exception:  # arguments that do not fit: logging would say so, and show them
        return False
    return len(text) <= _LONGEST and not holds(text, values)
