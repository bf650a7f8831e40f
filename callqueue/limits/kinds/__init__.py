"""The kinds of limits. A new kind is one class more, named in KINDS."""

# ruff: noqa: F401
# mypy: implicit-reexport

from collections.abc import Mapping

from callqueue.limits.kinds.base import (
    DAY,
    SECOND,
    Limit,
    Meter,
    Usage,
    parse_rate,
    with_known_fields,
)
from callqueue.limits.kinds.token_bucket import TokenBucket
from callqueue.limits.kinds.windows import Concurrency, FixedWindow, SlidingWindow

# By the names under which dispensers tell each other of their limits.
KINDS: Mapping[str, type[Limit]] = {
    kind.__name__: kind for kind in (SlidingWindow, FixedWindow, TokenBucket, Concurrency)
}
