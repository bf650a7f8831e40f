"""Histograms of durations: so many in each of some stretches, of which each is a tenth longer than
the one before. So a percentile of any of them, or of many together, is right to a twentieth. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

# As JSON keeps it: by the stretch's number, as a text, how many durations it holds.
Histogram = Mapping[str, int]

_FACTOR = math.log(1.1)
_HALF = math.sqrt(1.1)  # from a stretch's begin to its middle
_SHORTEST = 0.001  # seconds; what is shorter is as this
P50, P95 = 0.5, 0.95


def place(seconds: float) -> str:
    """The stretch that a duration is in."""
    return str(int(math.log(max(seconds, _SHORTEST) / _SHORTEST) / _FACTOR))


def add(into: dict[str, int], histogram: Histogram) -> None:
    """Add what a histogram holds to another."""
    for name, count in histogram.items():
        into[name] = into.get(name, 0) + count


def together(histograms: Iterable[Histogram]) -> dict[str, int]:
    """One histogram of all that these hold."""
    found: dict[str, int] = {}
    for one in histograms:
        add(found, one)
    return found


def upto(histogram: Histogram, bounds: Sequence[int]) -> list[int]:
    """How many durations there are before each of these stretches; at last, how many in all."""
    below = [sum(n for at, n in histogram.items() if int(at) < bound) for bound in bounds]
    return [*below, sum(histogram.values())]


def begin(stretch: int) -> float:
    """When a stretch begins, in seconds."""
    return _SHORTEST * math.exp(_FACTOR * stretch)


def percentile(histogram: Histogram, share: float) -> float | None:
    """The duration in seconds that this share of them does not exceed; None where there are
    none.
    """
    left = share * sum(histogram.values())
    for stretch in sorted(map(int, histogram)):
        left -= histogram[str(stretch)]
        if left <= 0:
            return 0.0 if not stretch else begin(stretch) * _HALF
    return None


def mean(histogram: Histogram) -> float | None:
    """Their mean in seconds; None where there are none."""
    count = sum(histogram.values())
    if not count:
        return None
    return sum(n * begin(int(at)) * _HALF for at, n in histogram.items()) / count
