"""What a waiter does besides waiting, since perhaps no dispenser runs that does it: it lets the
clock settle, and ends what died with its process.
"""

from __future__ import annotations

from callqueue import database, tables
from callqueue.ledger import clock_jumps
from callqueue.maintenance import recovery
from callqueue.permits.begun import now

OVERDUE = 1.0  # seconds between two looks for attempts whose caller has died
_looked_for_overdue: dict[str, float] = {}


def settling(using: str) -> float:
    """Seconds until a process that has just begun may make a pass, where there are dispensers."""
    if database.in_transaction(using):
        return 0.0
    left = clock_jumps.watch(using).settles_in()
    return left if left > 0 and tables.dispensers(using).exists() else 0.0


def end_overdue(using: str) -> None:
    """End what died with its process, and is waited for: perhaps no dispenser does so."""
    # A test's clock may go back.
    if abs(now() - _looked_for_overdue.get(using, -OVERDUE)) >= OVERDUE:
        _looked_for_overdue[using] = now()
        recovery.end_lost(using)
        recovery.void_unbegun(using)
