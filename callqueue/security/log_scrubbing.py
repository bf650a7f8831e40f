"""What others log while a call is made is scrubbed of its secrets.

The secrets and the payload of the call in hand enter, for as long as a block runs; log records of
Celery and urllib3 leave without the secrets, tracebacks included. Each thread has its own call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from callqueue.security.scrubbing import clean, holds, payload_of, scrub, scrub_json

_LOGGERS = (
    "celery.app.trace",
    "urllib3.connection",
    "urllib3.connectionpool",
    "urllib3.response",
    "urllib3.util.retry",
    "urllib3.poolmanager",
    "requests",
)
_in_hand: ContextVar[tuple[tuple[str, ...], str, Any]] = ContextVar(
    "callqueue_in_hand", default=((), "", None)
)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


@contextmanager
def at_work(values: tuple[str, ...], method: str = "", params: Any = None) -> Iterator[None]:
    """While the block runs, this thread makes a call with these secrets and this payload.

    What Celery's and urllib3's own loggers say meanwhile is scrubbed, tracebacks included;
    `cleaned` knows what to take out.
    """
    if values:
        _watch_loggers()
    token = _in_hand.set((values, method, params))
    try:
        yield
    finally:
        _in_hand.reset(token)


def cleaned(text: str) -> str:
    """`clean` for the call that this thread makes."""
    values, method, params = _in_hand.get()
    return clean(text, values, payload_of(method, params))


class _Scrubbing(logging.Filter):
    """Takes the secrets of the call in hand out of a record: its message, its traceback, and what
    was given beside them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        values = _in_hand.get()[0]
        if values:
            record.msg, record.args = scrub(_message(record), values), ()
            if record.exc_info:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            if record.exc_text and holds(record.exc_text, values):
                record.exc_text, record.exc_info = scrub(record.exc_text, values), None
            for name in record.__dict__.keys() - _STANDARD:
                record.__dict__[name] = scrub_json(record.__dict__[name], values)
        return True


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that do not fit: logging would say so, and show them
        return str(record.msg)


_scrubbing = _Scrubbing()


def _watch_loggers() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_scrubbing)
