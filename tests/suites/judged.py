"""What a published suite showed, for a person to read: the tests that failed, and why."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def passed(report: Path, suite: str) -> int:
    """How many pass, by a report in JUnit's form; prints the others, with their reasons."""
    assert report.exists(), f"{suite} did not run"
    count, failed = 0, {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            failed[f"{case.get('classname')}::{case.get('name')}"] = wrong.get("message") or ""
        elif case.find("skipped") is None:
            count += 1
    print(f"{suite}: {count} of {count + len(failed)} pass")
    for name, why in failed.items():
        print(f"  {name}: {why[:300]}")
    return count
