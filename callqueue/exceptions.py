"""What callqueue refuses: each says what is wrong and what to do. A refused send wrote nothing."""

from __future__ import annotations

from datetime import datetime


class CallQueueError(Exception):
    """The base of everything callqueue raises on purpose."""


class InvalidCall(CallQueueError):
    """The call cannot be accepted as it is; `field` names what is wrong: ``params.url``."""

    def __init__(self, field: str, why: str) -> None:
        self.field = field
        self.why = why
        super().__init__(f"{field}: {why}")


class UnknownRule(CallQueueError):
    """No rule has this name; the message suggests the nearest one."""


class NotAllowed(CallQueueError):
    """The call may not go there, by ALLOWED_HOSTS, ALLOWED_NETWORKS, its rule or its secrets."""


class NotNow(CallQueueError):
    """A permit was not to be had in time. `until`: when it should be, or None; `reason`: why."""

    def __init__(self, until: datetime | None, reason: str) -> None:
        self.until = until
        self.reason = reason
        when = f", until {until.isoformat()}" if until is not None else ""
        super().__init__(f"{reason}{when}")


class AnswerCut(CallQueueError):
    """An answer is not read as if it were whole: `size` bytes came, and `kept` are kept."""

    def __init__(self, size: int, kept: int, why: str) -> None:
        self.size = size
        self.kept = kept
        super().__init__(why.format(size=size, kept=kept))


class IllegalTransition(CallQueueError):
    """The call is in a state from which it cannot be requeued or cancelled."""
