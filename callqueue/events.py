"""What happens: each event's name, its one log line and, where others may listen, its signal.

Takes names, ids and reasons; never a secret, a payload or a response body.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType

from django.dispatch import Signal

logger = logging.getLogger("callqueue")

call_finished = Signal()  # call_id, status: any final state
call_failed = Signal()  # call_id, status, reason
call_unknown = Signal()  # call_id, status, reason
rule_held = Signal()  # rule, per, value, until, reason
limit_exceeded = Signal()  # limit, rule, highest, allowed

_EVENTS: dict[str, tuple[int, Signal | None]] = {
    "call_done": (logging.DEBUG, None),
    "call_failed": (logging.WARNING, call_failed),
    "call_unknown": (logging.ERROR, call_unknown),
    "call_expired": (logging.INFO, None),
    "call_cancelled": (logging.INFO, None),
    "call_requeued": (logging.INFO, None),
    "call_discarded": (logging.INFO, None),
    "call_reconciled": (logging.INFO, None),
    "reconcile_failed": (logging.WARNING, None),
    "attempt_failed": (logging.INFO, None),
    "attempt_lost": (logging.WARNING, None),
    "attempt_refused": (logging.INFO, None),
    "attempts_voided": (logging.WARNING, None),
    "calls_released": (logging.DEBUG, None),
    "pass_failed": (logging.ERROR, None),
    "chore_failed": (logging.ERROR, None),
    "publish_failed": (logging.INFO, None),
    "rule_held": (logging.WARNING, rule_held),
    "rule_paused": (logging.WARNING, rule_held),
    "rule_resumed": (logging.INFO, None),
    "limit_changed": (logging.WARNING, None),
    "settings_differ": (logging.WARNING, None),
    "settings_agree": (logging.INFO, None),
    "limit_exceeded": (logging.CRITICAL, limit_exceeded),
    "ledger_went_back": (logging.CRITICAL, None),
    "clock_jumped": (logging.ERROR, None),
    "database_away": (logging.ERROR, None),
    "broker_away": (logging.ERROR, None),
    "record_delayed": (logging.WARNING, None),
    "record_failed": (logging.ERROR, None),
    "calls_pruned": (logging.INFO, None),
    "listener_failed": (logging.ERROR, None),
    "threads_exhausted": (logging.WARNING, None),
    "worker_starved": (logging.WARNING, None),
}


def emit(event: str, **facts: Any) -> None:
    """Log the event as one line of ``name key=value ...`` and send its signal. A listener that
    fails is logged, no more.
    """
    level, signal = _EVENTS[event]
    if logger.isEnabledFor(level):
        line = " ".join(f"{name}={_shown(value)}" for name, value in facts.items())
        logger.log(level, "%s %s", event, line, extra={"event": event, "facts": facts})
    if signal is not None:
        notify(signal, **facts)


def notify(signal: Signal, **facts: Any) -> None:
    """Send a signal to whoever listens; a listener that fails is logged, no more, and keeps it from
    none of the others. In a loop that must go round, somebody else sends it: see `hand_over`.
    """
    if signal.receivers:
        hand_over(lambda: _send(signal, facts))


def hand_over(work: Callable[[], object]) -> None:
    """Run the project's own code: here and now, or by whoever does so for this thread."""
    put: Callable[[Callable[[], object]], object] | None = getattr(_thread, "put", None)
    if put is None:
        work()
    else:
        put(work)


@contextmanager
def handed_over(put: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """In this block, what this thread has to run of the project's own code goes to `put`."""
    before, _thread.put = getattr(_thread, "put", None), put
    try:
        yield
    finally:
        _thread.put = before


_thread = threading.local()


def _send(signal: Signal, facts: Any) -> None:
    for listener in list(signal.receivers or ()):
        alone = Signal()
        alone.receivers = [listener]
        try:
            raised = next(
                (result for _, result in alone.send_robust(sender="callqueue", **facts)), None
            )
        except BaseException as error:  # SystemExit and its like, which Django lets through
            raised = error
        if isinstance(raised, BaseException):
            emit("listener_failed", receiver=_name(listener[1]), error=type(raised).__name__)


def _name(receiver: Any) -> str:
    """A receiver's name, as a signal holds it: mostly by a weak reference."""
    function = receiver() if isinstance(receiver, ReferenceType) else receiver
    return str(getattr(function, "__qualname__", repr(function)))


def _shown(value: Any) -> str:
    """One word, in quotes and with escapes where it would be more, or act on a terminal."""
    text = str(value)
    return repr(text) if not text or " " in text or not text.isprintable() else text
