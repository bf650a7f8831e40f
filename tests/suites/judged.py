"""What a suite was expected to show, against what it showed: a failure that nobody expected, and an
expected one that did not come, are both faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree


@dataclass
class Verdicts:
    """The tests of a run by their names, and why those that failed did."""

    passed: set[str]
    failed: dict[str, str]
    skipped: set[str]

    def counts(self) -> str:
        return f"{len(self.passed)} of {len(self.passed) + len(self.failed)} pass"


def read(report: Path) -> Verdicts:
    """From a report in JUnit's form; a test has the name of its class, or module, and its own."""
    verdicts = Verdicts(set(), {}, set())
    for case in ElementTree.parse(report).iter("testcase"):
        place = (case.get("classname") or "").rpartition(".")[2]
        name = f"{place}::{case.get('name')}"
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            verdicts.failed[name] = (wrong.get("message") or "")[:300]
        elif case.find("skipped") is not None:
            verdicts.skipped.add(name)
        else:
            verdicts.passed.add(name)
    return verdicts


def complaints(
    verdicts: Verdicts,
    differences: Mapping[str, str],
    may_differ: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """What the table of expected differences (a test, or its name without parameters, and the
    reason) does not say, and what it says wrongly. `may_differ` has those that may fail and pass.
    """
    told = [
        f"{name} failed: {why}"
        for name, why in sorted(verdicts.failed.items())
        if not _reason(name, {**differences, **may_differ})
    ]
    told += [
        f"{name} passed, and is listed as {_reason(name, differences)!r}"
        for name in sorted(verdicts.passed)
        if _reason(name, differences)
    ]
    known = verdicts.passed | verdicts.failed.keys() | verdicts.skipped
    bare = known | {_bare(name) for name in known}
    listed = {**differences, **may_differ}
    told += [f"{name} is listed, and was not run" for name in listed if name not in bare]
    return told


def by_reason(verdicts: Verdicts, differences: Mapping[str, str]) -> str:
    """How many tests differ for each reason, for a person."""
    counts = Counter(_reason(name, differences) or "NOT EXPECTED" for name in verdicts.failed)
    return "\n".join(f"{number:4} {reason}" for reason, number in counts.most_common())


def _reason(name: str, differences: Mapping[str, str]) -> str:
    return differences.get(name) or differences.get(_bare(name)) or ""


def _bare(name: str) -> str:
    return name.partition("[")[0]
