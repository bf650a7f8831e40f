"""The states of a call, how an attempt ended, and the legal moves from state to state. Pure."""

from __future__ import annotations

from enum import Enum

NEW, DISPATCHED, ERROR, DONE, FAILED, CANCELLED, EXPIRED, UNKNOWN = range(8)

WAITING = (NEW, ERROR)
UNFINISHED = (NEW, DISPATCHED, ERROR)
FINAL = (DONE, FAILED, CANCELLED, EXPIRED, UNKNOWN)
# The method of calls that nobody is sent to make: the process that asked for one makes it itself.
PERMIT = "permit"
# How the names of such processes begin, where an attempt says who began it.
OF_PERMITS = "permit "

NEITHER_NEW_NOR_DONE = (DISPATCHED, ERROR, FAILED, CANCELLED, EXPIRED, UNKNOWN)  # few

REQUEUABLE = (ERROR, FAILED, UNKNOWN, CANCELLED, EXPIRED)  # DONE too, with again=True
MADE_PERHAPS = (UNKNOWN, DONE)  # may have been made already: people are asked before a requeue
CANCELLABLE = WAITING  # DISPATCHED too, while no worker has begun it


class Move(Enum):
    """The legal moves of a call, by verb: from which states, to which. `transitions` makes them."""

    RELEASE = WAITING, (DISPATCHED,)  # every limit admits the call
    RECORD = (DISPATCHED,), (NEW, ERROR, DONE, FAILED, EXPIRED, UNKNOWN)  # the attempt has ended
    VOID = (DISPATCHED,), (NEW, ERROR)  # no worker began the attempt
    LOSE = (DISPATCHED,), (ERROR, FAILED, UNKNOWN)  # a worker began the attempt and fell silent
    EXPIRE = WAITING, (EXPIRED,)  # `expires_at` has passed
    FAIL = WAITING, (FAILED,)  # its rule is gone, or no limit ever admits its cost
    CANCEL = (*CANCELLABLE, DISPATCHED), (CANCELLED,)  # no worker has begun it
    REQUEUE = REQUEUABLE, (NEW,)
    REQUEUE_AGAIN = (*REQUEUABLE, DONE), (NEW,)  # with again=True
    RECONCILE = (UNKNOWN,), (DONE, FAILED, NEW)  # the rule's hook knows what became of it

    def __init__(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        self.sources, self.targets = sources, targets


# How an attempt ended. OPEN: not recorded yet.
OPEN = ""
SUCCEEDED = "succeeded"
ERRORED = "failed"  # will be, or might have been, retried
GAVE_UP = "gave up"  # final by its answer
THROTTLED = "throttled"  # refused by the provider's limit
LOST = "lost"  # begun, and no answer was ever recorded
VOIDED = "voided"  # released and never begun: it never reached the wire, and is not charged
OUTCOMES = (SUCCEEDED, ERRORED, GAVE_UP, THROTTLED, LOST, VOIDED)
# Few of many attempts; these and answers of another kind than success have an index of their own.
FAULTY = (ERRORED, GAVE_UP, THROTTLED, LOST, VOIDED)
BEYOND_SUCCESS = 300  # HTTP statuses from here on
