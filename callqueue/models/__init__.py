"""The tables: rows only. What may be done with them is in `callqueue.managers`, and below."""

from callqueue.models.attempts import BelatedEnding, CallAttempt
from callqueue.models.calls import CallQueue
from callqueue.models.history import Sum, Summed
from callqueue.models.rules import (
    DispenserState,
    Hold,
    KeyNews,
    KeyTurn,
    LedgerState,
    OpinionState,
    RuleState,
    SettingsState,
    Tally,
)

__all__ = [
    "BelatedEnding",
    "CallAttempt",
    "CallQueue",
    "DispenserState",
    "Hold",
    "KeyNews",
    "KeyTurn",
    "LedgerState",
    "OpinionState",
    "RuleState",
    "SettingsState",
    "Sum",
    "Summed",
    "Tally",
]
