"""Other people's test suites. All of this folder is marked `fault` and `slow`: `make faults` runs
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("fault")
            item.add_marker("slow")
