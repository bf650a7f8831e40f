"""What happens: each event's name, its one log line and, where others may listen, its signal. Takes
names, ids and reasons; never a secret, a payload or a response body.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import ReferenceType

from django.dispatch import Signal

logger = logging.getLogger("callqueue")

call_finished = Signal()  # call_id, status: any final state
call_failed = Signal()  # call_id, status, rule, reason
call_unknown = Signal()  # call_id, status, rule, reason
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
    """Log the event, and send its signal here and now. A listener that fails is logged, no more."""
    log(event, **facts)
    signal = _EVENTS[event][1]
    if signal is not None:
        send_signal(signal, **facts)


def log(event: str, **facts: Any) -> None:
    """Log the event as one line of ``name key=value ...``."""
    level = _EVENTS[event][0]
    if logger.isEnabledFor(level):
        line = " ".join(f"{name}={_one_word(value)}" for name, value in facts.items())
        logger.log(level, "%s %s", event, line, extra={"event": event, "facts": facts})


def has_receivers(event: str) -> bool:
    signal = _EVENTS[event][1]
    return signal is not None and bool(signal.receivers)


def send_signal_of(event: str, facts: dict[str, Any]) -> None:
    """Send the signal, if any, of an event that a message names; none where it is unknown here."""
    signal = _EVENTS.get(event, (0, None))[1]
    if signal is not None:
        send_signal(signal, **facts)


def send_signal(signal: Signal, **facts: Any) -> None:
    """Send a signal to whoever listens; one that fails is logged, and keeps it from no other."""
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
            emit("listener_failed", receiver=_name_of(listener[1]), error=type(raised).__name__)


def _name_of(receiver: Any) -> str:
    function = receiver() if isinstance(receiver, ReferenceType) else receiver
    return str(getattr(function, "__qualname__", repr(function)))


def _one_word(value: Any) -> str:
    """One word, in quotes and with escapes where it would be more, or act on a terminal."""
    text = str(value)
    return repr(text) if not text or " " in text or not text.isprintable() else text
