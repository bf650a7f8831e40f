"""The table of attacks in SECURITY.md says what is tested, all of it, and nothing that is not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
DEFINED = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


def test_every_attack_names_tests_that_are_there_and_every_test_of_this_folder_is_named() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = page.split("## Attacks, what happens, and the test")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(lines) > 25
    for line in lines:
        attack, happens, tests = (cell.strip() for cell in line.strip("|").split(" | "))
        assert attack and happens
        named = NAMED.findall(tests)
        assert named and len(named) == tests.count("`") // 2, f"not all of these are tests: {tests}"
        for path, name in named:
            assert name in DEFINED.findall((ROOT / path).read_text(encoding="utf-8")), name
    here = {
        (str(path.relative_to(ROOT)), name)
        for path in Path(__file__).parent.glob("test_*.py")
        for name in DEFINED.findall(path.read_text(encoding="utf-8"))
        if path != Path(__file__)
    }
    assert here - set(NAMED.findall(section)) == set()
