"""Five published limiters as judges: how many of these instants does each refuse?

`python limiters.py N`: so many a second are allowed. In: a list of instants, in seconds, as JSON on
standard input. Out: the count that each refuses, as JSON. Their clocks show the instants, one after
the other. A process of its own, since clocks are replaced here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable

NOW = [0.0]
time.time = time.monotonic = lambda: NOW[0]
time.time_ns = time.monotonic_ns = lambda: int(NOW[0] * 1e9)


def limits(allowed: int) -> Callable[[], bool]:
    from limits import RateLimitItemPerSecond
    from limits.storage import MemoryStorage
    from limits.strategies import MovingWindowRateLimiter

    limiter, item = MovingWindowRateLimiter(MemoryStorage()), RateLimitItemPerSecond(allowed)
    return lambda: limiter.hit(item, "api")


def pyrate_limiter(allowed: int) -> Callable[[], bool]:
    from pyrate_limiter import Duration, InMemoryBucket, Rate, RateItem

    bucket = InMemoryBucket([Rate(allowed, Duration.SECOND)])

    def admits() -> bool:
        now = int(NOW[0] * 1000)
        bucket.leak(now)
        return bool(bucket.put(RateItem("api", now)))

    return admits


def aiolimiter(allowed: int) -> Callable[[], bool]:
    from aiolimiter import AsyncLimiter

    loop = asyncio.new_event_loop()
    loop.time = lambda: NOW[0]  # type: ignore[method-assign]

    async def admits(limiter: AsyncLimiter) -> bool:
        if not limiter.has_capacity():
            return False
        await limiter.acquire()
        return True

    async def made() -> AsyncLimiter:
        return AsyncLimiter(allowed, 1)

    limiter = loop.run_until_complete(made())
    return lambda: loop.run_until_complete(admits(limiter))


def throttled(allowed: int) -> Callable[[], bool]:
    from throttled import Throttled, rate_limiter, store

    quota = rate_limiter.per_sec(allowed, burst=allowed)
    limiter = Throttled(key="api", using="gcra", quota=quota, store=store.MemoryStore())
    return lambda: not limiter.limit().limited


def token_bucket(allowed: int) -> Callable[[], bool]:
    import token_bucket

    limiter = token_bucket.Limiter(allowed, allowed, token_bucket.MemoryStorage())
    return lambda: bool(limiter.consume("api"))


def main(allowed: int) -> None:
    instants = json.load(sys.stdin)
    refused = {}
    for judge in (limits, pyrate_limiter, aiolimiter, throttled, token_bucket):
        NOW[0] = 1e6
        admits = judge(allowed)
        refused[judge.__name__] = 0
        for instant in instants:
            NOW[0] = 1e6 + 5 + instant - instants[0]
            refused[judge.__name__] += not admits()
    print(json.dumps(refused))


if __name__ == "__main__":
    main(int(sys.argv[1]))
