"""Room: how many calls a dispenser may release at most, since whoever makes them has no more."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from callqueue.handlers import HTTP_METHODS


@dataclass(frozen=True)
class Room:
    """For how many HTTP calls there is room, and for how many others."""

    http: float = math.inf
    handled: float = math.inf

    @property
    def most(self) -> float:
        """How many calls are worth a look."""
        return max(0, self.http, self.handled)

    def has(self, count: int, *, is_http: bool) -> bool:
        """Whether there is more than so many of a kind take."""
        return count < (self.http if is_http else self.handled)

    def without(self, methods: Iterable[str]) -> Room:
        """What is left of it once calls of these methods are released."""
        is_http = [method in HTTP_METHODS for method in methods]
        return Room(self.http - sum(is_http), self.handled - len(is_http) + sum(is_http))

    def is_more_than(self, other: Room) -> bool:
        """Whether there is more of one of the two."""
        return self.http > max(0, other.http) or self.handled > max(0, other.handled)


ROOMY = Room()  # where workers make them
