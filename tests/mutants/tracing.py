"""A plugin of pytest that writes down which functions of the core each test calls.

In: CALLQUEUE_MUTANTS_MAP, a file. Out: there, as JSON, by test its seconds and its functions.
"""

from __future__ import annotations

import cProfile
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

CORE = str(Path(__file__).resolve().parents[2] / "callqueue") + os.sep
found: dict[str, tuple[float, list[str]]] = {}
profiles: list[cProfile.Profile] = []


def profile() -> None:
    """From here on this thread's calls are noted, by code of C that costs little."""
    profiles.append(cProfile.Profile(builtins=False))
    profiles[-1].enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    profiles.clear()
    began = time.monotonic()
    threading.setprofile(lambda *_: profile())  # a thread's first event takes this one's place
    profile()
    try:
        return (yield)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
        name = item.nodeid.partition("[")[0]
        before, known = found.get(name, (0.0, []))
        found[name] = before + time.monotonic() - began, sorted({*known, *called()})


def called() -> set[str]:
    """The functions of the core in what was noted, by file and name."""
    names = set()
    for one in profiles:
        with suppress(RuntimeError):  # a thread that goes on
            for entry in one.getstats():
                if (code := entry.code) and getattr(code, "co_filename", "").startswith(CORE):
                    names.add(f"{code.co_filename[len(CORE) :]}:{code.co_qualname}")
    return names


def pytest_sessionfinish() -> None:
    Path(os.environ["CALLQUEUE_MUTANTS_MAP"]).write_text(json.dumps(found), encoding="utf-8")
