"""Limits, rules and budgets: arithmetic on (now, charges), with no database and no clock."""

from callqueue.limits.kinds import Concurrency, FixedWindow, SlidingWindow, TokenBucket

__all__ = ["Concurrency", "FixedWindow", "SlidingWindow", "TokenBucket"]
