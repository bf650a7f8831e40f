"""Other people's test suites. All of this folder is marked `fault` and `slow`: `make faults` runs
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.length import slow_ones_left_out

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("fault")
            item.add_marker("slow")
    with slow_ones_left_out(config, items, HERE):
        yield
