"""How long a backlog takes to drain under its limits, as arithmetic: for tables that show every
rule, every second.

In: a limit, its meter, how much waits for it. Out: seconds, or None where nobody can say. An
estimate; simulate.py follows each call instead, and takes its time. Pure: no clock, no database.
"""

from __future__ import annotations

import math

from callqueue.limits.kinds import SECOND, Concurrency, FixedWindow, Limit, Meter, TokenBucket

# calendar windows that are looked up one by one; the rest are taken to be as long as the mean of
# those
WINDOWS = 400


def seconds_until_gone(
    limit: Limit, meter: Meter, amount: float, now: int, latency: float
) -> float | None:
    """Seconds until a backlog that charges `amount` has passed the limit; None where that hangs on
    unknown latencies.

    `meter` is the limit's at `now` (microseconds); `latency` is what a call takes, in seconds, 0
    where it is not known.
    """
    if isinstance(limit, Concurrency):
        return amount / limit.n * latency if latency else (0.0 if amount <= meter.free else None)
    rest = amount - meter.free
    if rest <= 0:
        return 0.0
    if isinstance(limit, TokenBucket):
        return rest * limit.period_us / limit.n / SECOND
    if isinstance(limit, FixedWindow):
        return _calendar_windows(limit, rest, now)
    return _periods(limit, meter, amount, now, latency)


def _periods(limit: Limit, meter: Meter, amount: float, now: int, latency: float) -> float:
    """Every period the slots open in the same order: those free now first, then each as its charge
    leaves.
    """
    period = (limit.window_us + round(limit.jitter * SECOND)) / SECOND
    full, last = divmod(max(0, math.ceil(amount) - 1), limit.capacity)
    first = meter.free_at(last + 1)
    return full * period + (period + latency if first is None else (first - now) / SECOND)


def _calendar_windows(limit: FixedWindow, rest: float, now: int) -> float:
    """Until the beginning of the window in which the last of it fits."""
    wanted = math.ceil(rest / limit.n)
    first = instant = limit.window(now)[1]
    counted = min(wanted, WINDOWS)
    for _ in range(counted - 1):
        instant = limit.window(instant)[1]
    each = (instant - first) / (counted - 1) if counted > 1 else 0
    return float((instant - now + (wanted - counted) * each) / SECOND + limit.jitter)
