"""The states of a call, and the legal moves between them. Pure."""

from __future__ import annotations

NEW, DISPATCHED, ERROR, DONE, FAILED, CANCELLED, EXPIRED, UNKNOWN = range(8)

WAITING = (NEW, ERROR)
UNFINISHED = (NEW, DISPATCHED, ERROR)
FINAL = (DONE, FAILED, CANCELLED, EXPIRED, UNKNOWN)

REQUEUABLE = (ERROR, FAILED, UNKNOWN, CANCELLED, EXPIRED)  # DONE too, with again=True
CANCELLABLE = (NEW, ERROR)  # DISPATCHED too, while no worker has begun it

# How an attempt ended. OPEN: no answer yet.
OPEN = ""
SUCCEEDED = "succeeded"
ERRORED = "failed"  # will be, or might have been, retried
GAVE_UP = "gave up"  # final by its answer
THROTTLED = "throttled"  # refused by the provider's limit
LOST = "lost"  # begun, and no answer was ever recorded
VOIDED = "voided"  # released and never begun: it never reached the wire, and is not charged
OUTCOMES = (SUCCEEDED, ERRORED, GAVE_UP, THROTTLED, LOST, VOIDED)
