"""The kinds of limits, a module each. A new kind is one class more, named in KINDS."""

# ruff: noqa: F401
# mypy: implicit-reexport

from collections.abc import Mapping

from callqueue.limits.kinds.base import Limit, Meter, Usage
from callqueue.limits.kinds.concurrency import Concurrency
from callqueue.limits.kinds.fields import DAY, SECOND, parse_rate, with_known_fields
from callqueue.limits.kinds.fixed_window import FixedWindow
from callqueue.limits.kinds.sliding_window import SlidingWindow
from callqueue.limits.kinds.token_bucket import TokenBucket

# By the names under which dispensers tell each other of their limits.
KINDS: Mapping[str, type[Limit]] = {
    kind.__name__: kind for kind in (SlidingWindow, FixedWindow, TokenBucket, Concurrency)
}
