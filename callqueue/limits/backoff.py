"""How long to wait before a failed attempt is tried again.

In: the rule's Retry, how many attempts failed, a random number. Out: seconds. Pure: draws nothing
itself. Never less than half of the exponential wait, never more than the cap.
"""

from __future__ import annotations

from callqueue.limits.rules import Retry


def backoff(retry: Retry, failures: int, rand: float) -> float:
    """Seconds before the next try after `failures` (1 and up) failed ones; `rand` in [0, 1) draws
    the jittered half.

    The jitter is the one called "equal" in "Exponential Backoff And Jitter" (AWS Architecture Blog,
    2015): half of the wait is certain, the other half drawn. "Full" jitter spreads calls more and
    may also return at once; calls here are spaced by the limits already, and a provider that just
    failed is better left alone for a while.
    """
    whole = min(retry.cap, _exponential(failures, float(retry.base), float(retry.factor)))
    return whole / 2 + whole / 2 * rand if retry.jitter else whole


def _exponential(failures: int, base: float, factor: float) -> float:
    """In floats throughout: a power of integers would be computed to its last digit."""
    if base == 0:
        return 0.0
    try:
        return base * factor ** max(0, failures - 1)
    except OverflowError:
        return float("inf")
