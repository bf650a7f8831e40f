"""What a published suite showed, for a person to read: the tests that failed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree


@dataclass
class Verdicts:
    """The tests of a run by their names, and why those that failed did."""

    passed: set[str]
    failed: dict[str, str]
    skipped: set[str]

    def __str__(self) -> str:
        counts = f"{len(self.passed)} of {len(self.passed) + len(self.failed)} pass"
        return "\n".join([counts, *(f"  {name}: {why}" for name, why in self.failed.items())])


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
