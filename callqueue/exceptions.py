"""What callqueue refuses, and why.

Every error a caller can meet derives from `CallQueueError`; each says which field or name is wrong
and what to do. A refused `send` has written nothing.
"""

from __future__ import annotations


class CallQueueError(Exception):
    """The base of everything callqueue raises on purpose."""


class InvalidCall(CallQueueError):
    """The call cannot be accepted as it is; `field` names the part that is wrong, such as
    ``params.url``.
    """

    def __init__(self, field: str, why: str) -> None:
        self.field = field
        self.why = why
        super().__init__(f"{field}: {why}")


class UnknownRule(CallQueueError):
    """No rule has this name; the message suggests the nearest one."""


class NotAllowed(CallQueueError):
    """The host or address may not be called, by ALLOWED_HOSTS or ALLOWED_NETWORKS."""


class IllegalTransition(CallQueueError):
    """The call is in a state from which it cannot be requeued or cancelled."""
