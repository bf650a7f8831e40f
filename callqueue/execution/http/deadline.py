"""When a request must have ended, and how busy it may keep this process.

The clock and what came off the network enter; the seconds that are left leave, or the reason why
there are none. Nothing here touches a network.
"""

from __future__ import annotations

import time

from callqueue import clocks
from callqueue.execution.http.errors import Flooded
from callqueue.execution.http.policy import Gate, Timeouts

clock = clocks.monotonic
MOST_TURNS = 32_768  # reads and chunks that an answer may come in, besides one for each KiB of it
# bytes off the network that are no body: heads, chunks' sizes, trailers, what unfolds to nothing
WASTE = 512 * 1024
_SPELL = 64  # turns after which other threads get theirs
_REST = 0.001  # seconds that they get


def now() -> float:
    """Seconds, from a clock that never jumps; a test may put another in its place."""
    return clock()


class Deadline:
    """The end of one request, its gate, and what its answer has cost so far."""

    def __init__(self, timeouts: Timeouts, gate: Gate) -> None:
        self.timeouts = timeouts
        self.gate = gate
        self.at = min(now() + timeouts.total, gate.ends)
        self.in_gate = 0.0
        self.unfolded = 0  # bytes of bodies, as they are kept
        self._off_network = 0
        self._turns = 0

    def left(self, bound: float) -> float:
        """Seconds that the next wait may take. TimeoutError where the total is used up."""
        left = self.at - now()
        if left <= 0:
            raise TimeoutError(f"{self._whole()} is over")
        return left if left < bound else bound

    def pass_gate(self) -> float:
        """Seconds spent in the gate. The deadline moves by them, but not past the gate's own."""
        before = now()
        self.gate.wait()
        waited = now() - before
        self.in_gate += waited
        self.at = min(self.at + waited, self.gate.ends)
        return waited

    def why_late(self, bound_name: str, bound: float) -> str:
        """Which timeout it was that struck just now."""
        return self._whole() if self.at <= now() else f"the {bound_name} timeout of {bound:g} s"

    def _whole(self) -> str:
        if self.at == self.gate.ends:
            return "the lease"
        return f"the total timeout of {self.timeouts.total:g} s"

    def took(self, count: int) -> None:
        """Count the bytes of one read off the network. Flooded where hardly any of it is body."""
        self._off_network += count
        waste = self._off_network - self.unfolded
        if waste > WASTE + self._off_network // 4:
            raise Flooded(f"{self._off_network // 1024} KiB came that are hardly any body")
        if waste > WASTE // 4:
            time.sleep(_REST)
        self.turn()

    def turn(self) -> None:
        """Count a read or a chunk, each of which costs much the same whatever it brings. Flooded
        where there are too many.
        """
        self._turns += 1
        if self._turns > MOST_TURNS + self._off_network // 1024:
            raise Flooded(f"it came in more than {MOST_TURNS} pieces")
        if self._turns % _SPELL == 0:
            time.sleep(_REST)
