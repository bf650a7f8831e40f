"""Fixtures of the fault suite. `make faults` runs it at length, `make test` in a short form: see `length`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.faults.stage import Stage
    from tests.support.processes import Processes
    from tests.support.recorder import Recorder

HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """All of this folder is marked `fault`; what is `slow` as well is left to `make faults`.

    Marked before anyone chooses by marks, left out after all have looked: a file may hold slow tests only.
    """
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker("fault")
    yield
    slow = [item for item in here if item in items and item.get_closest_marker("slow") and not _at_length(config)]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _at_length(config: pytest.Config) -> bool:
    return "fault" in (config.option.markexpr or "")


@pytest.fixture
def length(request: pytest.FixtureRequest) -> Callable[[Any, Any], Any]:
    """`length(short, long)`: the first in `make test`, the second in `make faults`."""
    return lambda short, long: long if _at_length(request.config) else short


@pytest.fixture
def stage(processes: Processes, vendor: Recorder, configure: Callable[[str], None], tmp_path: Path) -> Iterator[Stage]:
    """Workers, dispensers and a vendor, on any broker (or on `broker`)."""
    from tests.faults.stage import Stage

    folder = tmp_path / "sabotage"
    folder.mkdir()
    made = Stage(processes, vendor, configure, folder)
    made.rule()
    yield made
    for running in processes.started:
        running.kill()
