"""Fixtures of the attacks. What is `slow` here is marked `fault` too, and left to `make faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import browser, chromium, site  # noqa: F401
from tests.db.conftest import rules  # noqa: F401

if TYPE_CHECKING:
    from tests.db.security.test_what_goes_out import Listener

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker("fault")


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    """`listen("127.0.0.2", port=..., answer=...)`: a server there until the test ends, which counts
    whoever connects.
    """
    from tests.db.security.test_what_goes_out import Listener

    opened: list[Any] = []

    def at(host: str = "127.0.0.1", **options: Any) -> Listener:
        opened.append(Listener(host, **options))
        return opened[-1]  # type: ignore[no-any-return]

    yield at
    for listener in opened:
        listener.close()
