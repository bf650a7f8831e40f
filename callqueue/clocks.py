"""A reading of the database's clock, the only one compared, between two instants of this process's
own. Ledger time is what it shows less how far the ledger was moved (`ledger.ledger_time`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    # To mypy an instant is no bare number; what lies between two is one. When it runs it is.

    class Us(int):
        """An instant in microseconds since the epoch: of ledger time, unless a name says wall."""

        def __add__(self, us: int, /) -> Us: ...
        @overload
        def __sub__(self, instant: Us, /) -> int: ...  # type: ignore[overload-overlap]
        @overload
        def __sub__(self, us: int, /) -> Us: ...
        def __sub__(self, other: int, /) -> int: ...

    class Mono(float):
        """An instant in seconds of a monotonic clock: this process's own."""

        def __add__(self, seconds: float, /) -> Mono: ...
        @overload
        def __sub__(self, instant: Mono, /) -> float: ...  # type: ignore[overload-overlap]
        @overload
        def __sub__(self, seconds: float, /) -> Mono: ...
        def __sub__(self, other: float, /) -> float: ...

else:
    Us, Mono = int, float

# microseconds that the two clocks may differ by between two readings, besides a share of the time
TOLERANCE = 10_000
FRESH = 20.0  # seconds for which a reading helps to narrow later ones
DRIFT = 1e-4  # how much one clock may run faster than the other, as a share


NEVER = Us(0)
_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", None)


def monotonic() -> Mono:
    """This process's clock. Where the system can tell (Linux), it counts suspended time, too."""
    # `time.monotonic` stands still meanwhile, so a worker that slept past its lease would send.
    return Mono(time.monotonic() if _BOOT_TIME is None else time.clock_gettime(_BOOT_TIME))


@dataclass(frozen=True)
class Reading:
    """Ledger time: `at`, at some moment between two instants of this process's monotonic time. How
    far the ledger was `moved` by then (microseconds), how often anybody had agreed to ledger time
    (`agreements`) and when that was last (`agreed_at`). Without a jump that nobody has dealt with,
    ledger time goes on as time does.
    """

    at: Us
    before: Mono
    after: Mono
    moved: int = 0
    agreements: int = 0
    agreed_at: Us = NEVER

    @property
    def wall(self) -> Us:
        return self.at + self.moved

    def jump_until(self, later: Reading) -> int:
        """By how many microseconds ledger time went further until `later` than time did; below 0:
        less far; 0 within the tolerance. Errs upwards, by no more than the readings took: ledger
        time that is set back by so much is late, never early.
        """
        went = later.at - self.at
        least, most, slack = self._bounds(later)
        return 0 if least - slack <= went <= most + slack else went - least

    def contradicts(self, later: Reading) -> bool:
        """Whether ledger time went on otherwise than time, by over TOLERANCE: a drift or a jump."""
        least, most, _ = self._bounds(later)
        return not least - TOLERANCE <= later.at - self.at <= most + TOLERANCE

    def credit(self, later: Reading) -> Us:
        """What `later` read; at most this reading's time and what has surely passed since."""
        least, _, slack = self._bounds(later)
        return min(later.at, self.at + least + slack)

    def latest_ledger_time_at(self, instant: Mono) -> Us:
        """The latest that ledger time can have been at this monotonic instant."""
        return self.at + round((instant - self.before) * 1_000_000)

    def monotonic_at(self, instant: Us) -> Mono:
        """A monotonic instant at which ledger time has certainly reached `instant`."""
        return self.after + (instant - self.at) / 1_000_000

    def _bounds(self, later: Reading) -> tuple[int, int, int]:
        # the least and the most that passed between the two, and the tolerance; microseconds
        least = round((later.before - self.after) * 1_000_000)
        most = round((later.after - self.before) * 1_000_000)
        return least, most, TOLERANCE + round(2 * DRIFT * max(0, most))


class ClockEstimate:
    """Readings of the last seconds: each bounds how the two clocks stand, all bound it closer."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=16)

    def add(self, reading: Reading) -> Reading:
        """Keep a reading. It, narrowed by the others; those are forgotten if they contradict it."""
        while self._readings and reading.after - self._readings[0].after > FRESH:
            self._readings.popleft()
        self._readings.append(reading)
        before, after = reading.before, reading.after
        for other in self._readings:
            passed = (reading.at - other.at) / 1_000_000
            drift = abs(passed) * DRIFT
            before, after = (
                max(before, other.before + passed - drift),
                min(after, other.after + passed + drift),
            )
        if before <= after:
            return replace(reading, before=before, after=after)
        self._readings.clear()  # they contradict each other: one of the clocks was set
        self._readings.append(reading)
        return reading
