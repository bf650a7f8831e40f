"""What one request may do: where it may go, how long it may take, and when its first byte may go.

Values only. Nothing here touches a network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What may be called, whom to trust, and how much of a body to read. `allowed_networks` are
    CIDR ranges.
    """

    allowed_hosts: tuple[str, ...] = ("*",)
    allowed_networks: tuple[str, ...] = ()
    verify: bool | str = True
    max_response_bytes: int = 1048576


@dataclass(frozen=True)
class Timeouts:
    """Seconds: for one connection, between two bytes, and from the name to the last byte."""

    connect: float = 3.05
    read: float = 27
    total: float = 60


class Gate:
    """What a request passes just before its first byte. This gate is always open.

    `sent_at` is clocks.monotonic() just after the last byte of the request; None where no byte of
    it may have reached the network. `ends` is when the request must have
    ended, on that clock, whatever its timeouts say. `is_whole`: whether the last byte has left.
    """

    sent_at: float | None = None
    ends: float = math.inf
    is_whole: bool = False

    def has_arrived(self) -> bool:
        """Whether the other side has all that was sent. A connection puts in what can tell."""
        return True

    def wait(self) -> None:
        """Return when the first byte may go, or raise Dropped. Called connected and composed.

        The time spent here counts against no timeout. Called once more where the server hung up
        meanwhile: then nothing has been sent, and there is a new connection.
        """
