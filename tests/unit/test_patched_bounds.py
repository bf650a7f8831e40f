"""Which tests give a bound of the product more than it has. A fault that the bound brings about is
then seen by nobody: counting in steps of an hour instead of 50 ms hid that it began anew at each.

Each such place has a reason here, and a test beside it that leaves the bound as it is, or smaller.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
REASONS = {
    "db/conftest.py: choosing.LEAST": "a pass's own figures; test_backpressure.py has the bound",
    "db/dispatch/test_in_workers.py: publisher.ALONE": "the test ends it itself, however slow it is",
    "db/dispatch/test_in_workers.py: worker.LOOK": "makes its fault larger: the end waits as long",
    "db/dispatch/test_in_workers.py: worker.WAIT": "makes its fault larger: the end waits as long",
}
IMPORTED = re.compile(r"from (callqueue[\w.]*) import (\([^)]*\)|[^\n]*)")
NUMBER = r"""(?:math\.|float\(")?(inf|\d[\d_.]*)"""
PATCHED = r"""(?:setattr|object)\(\s*(?:(\w+),\s*"|"(callqueue[\w.]*)\.)([A-Z_]+)",\s*""" + NUMBER
ASSIGNED = r"\n\s+(\w+)()\.([A-Z_]+) = " + NUMBER


def test_no_test_widens_a_bound_without_a_reason() -> None:
    found = {
        f"{path.relative_to(TESTS).as_posix()}: {bound}"
        for path in sorted(TESTS.rglob("*.py"))
        if "benchmarks" not in path.parts
        for bound in widened(path.read_text("utf-8"))
    }
    assert found == set(REASONS)


def widened(source: str) -> Iterator[str]:
    """The constants of the product that are given a number larger than their own."""
    packages = {
        name: package
        for package, names in IMPORTED.findall(source)
        for name in re.findall(r"\w+", names)
    }
    found = [*re.findall(PATCHED, source), *re.findall(ASSIGNED, source)]
    for name, path, constant, number in found:
        if not path and name not in packages:
            continue
        path = path or f"{packages[name]}.{name}"
        own = getattr(importlib.import_module(path), constant, None)
        if isinstance(own, int | float) and float(number) > own:
            yield f"{path.rpartition('.')[2]}.{constant}"
