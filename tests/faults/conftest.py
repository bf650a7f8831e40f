"""Fixtures of the fault suite: `make faults` runs it at length, `make test` in a short form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.length import is_at_length

if TYPE_CHECKING:
    from tests.faults.stage import Stage
    from tests.support.processes import Processes
    from tests.support.recorder import Recorder

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is marked `fault`, before anyone chooses by marks."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("fault")


@pytest.fixture
def length(request: pytest.FixtureRequest) -> Callable[[Any, Any], Any]:
    """`length(short, long)`: the first in `make test`, the second in `make faults`."""
    return lambda short, long: long if is_at_length(request.config) else short


@pytest.fixture
def stage(
    processes: Processes, vendor: Recorder, configure: Callable[[str], None], tmp_path: Path
) -> Stage:
    """Workers, dispensers and a vendor, on any broker (or on `broker`)."""
    from tests.faults.stage import Stage

    return Stage(processes, vendor, configure, tmp_path)
