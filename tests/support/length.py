"""How long a run is: what is both `slow` and `fault` is left to `make faults`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# marks of what runs in `make faults` only
ONLY_AT_LENGTH = [pytest.mark.slow, pytest.mark.fault]
AT_LENGTH = "CALLQUEUE_TEST_AT_LENGTH"
WHOLE = "CALLQUEUE_TEST_WHOLE"


def examples(short: int, long: int) -> int:
    """How many: fewer in `make test` than in `make faults`, or CALLQUEUE_EXAMPLES."""
    return int(
        os.environ.get("CALLQUEUE_EXAMPLES") or (long if os.environ.get(AT_LENGTH) else short)
    )


def is_at_length(config: pytest.Config) -> bool:
    """Whether this is `make faults`."""
    return "fault" in (config.option.markexpr or "")


def is_whole() -> bool:
    """Whether this is `make faults`, its runs of whole suites without a mark among them."""
    return bool(os.environ.get(WHOLE))


def note(config: pytest.Config) -> None:
    """Note it for modules that want to know it when they are imported."""
    os.environ.pop(AT_LENGTH, None)
    if is_at_length(config):
        os.environ[AT_LENGTH] = "1"


@contextmanager
def slow_ones_left_out(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Slow faults are left to `make faults`, after all have looked: a file may hold such only."""
    yield
    slow = [
        item
        for item in items
        if item.get_closest_marker("slow") and item.get_closest_marker("fault")
    ]
    if slow and not is_at_length(config):
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
