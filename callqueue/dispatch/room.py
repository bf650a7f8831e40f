"""Room: how many calls a dispenser may release at most, since whoever makes them has no more."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """For how many HTTP calls there is room, and for how many others."""

    http: float = math.inf
    handled: float = math.inf

    @property
    def most(self) -> float:
        """How many calls are worth a look."""
        return max(0, self.http) + max(0, self.handled)

    @property
    def only_http(self) -> bool | None:
        """Whether there is room for HTTP calls only, or for others only; None: for both."""
        return None if self.http >= 1 and self.handled >= 1 else self.http >= 1

    def has(self, count: int, *, is_http: bool) -> bool:
        """Whether there is more than so many of a kind take."""
        return count < (self.http if is_http else self.handled)

    def is_more_than(self, other: Room) -> bool:
        """Whether there is more of one of the two."""
        return self.http > max(0, other.http) or self.handled > max(0, other.handled)


ROOMY = Room()  # where workers make them
NO_ROOM = Room(0, 0)
