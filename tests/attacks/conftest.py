"""Fixtures of the attacks. What is `slow` here is marked `fault` too, and left to `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import browser, chromium, site  # noqa: F401
from tests.db.conftest import remote, rules  # noqa: F401

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker("fault")
