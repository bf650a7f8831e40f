"""How long a run is: `make test` leaves out what is slow in the folders that ask for it, `make faults` runs it all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def is_at_length(config: pytest.Config) -> bool:
    """Whether this is `make faults`."""
    return "fault" in (config.option.markexpr or "")


@contextmanager
def slow_ones_left_out(config: pytest.Config, items: list[pytest.Item], folder: Path) -> Iterator[None]:
    """Around pytest's own choice by marks: what is slow in this folder is left to `make faults`.

    Left out after all have looked: a file may hold slow tests only.
    """
    yield
    slow = [item for item in items if folder in item.path.parents and item.get_closest_marker("slow")]
    if slow and not is_at_length(config):
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
