"""The table of attacks in SECURITY.md says what is tested, all of it, and nothing that is not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
DEFINED = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


def rows() -> list[list[str]]:
    """The cells of the table's rows: attack, what happens, the tests."""
    section = (
        (ROOT / "SECURITY.md")
        .read_text(encoding="utf-8")
        .split("## Attacks, what happens, and the test")[1]
        .split("\n## ")[0]
    )
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_attack_says_what_happens_and_names_tests_that_are_there() -> None:
    assert len(rows()) > 25
    for row in rows():
        assert len(row) == 3, row
        named = NAMED.findall(row[2])
        assert row[1]
        assert named, row
        assert len(named) == row[2].count("`") // 2, f"not all of these are tests: {row[2]}"
        for path, name in named:
            assert name in DEFINED.findall((ROOT / path).read_text(encoding="utf-8")), (
                f"{path} has no {name}"
            )


def test_every_test_of_this_folder_is_in_the_table() -> None:
    named = {found for row in rows() for found in NAMED.findall(row[2])}
    here = {
        (str(path.relative_to(ROOT)), name)
        for path in Path(__file__).parent.glob("test_*.py")
        for name in DEFINED.findall(path.read_text(encoding="utf-8"))
        if path != Path(__file__)
    }
    assert here - named == set()


def test_what_is_slow_is_in_italics() -> None:
    """The page says which attacks are left to `make faults`."""
    for path in Path(__file__).parent.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        slow = set(re.findall(r"@pytest\.mark\.slow\n(?:@.*\n)*def (test_\w+)", text))
        for name in slow | set(DEFINED.findall(text)):
            row = next((row[2] for row in rows() if f"::{name}`" in row[2]), None)
            if row is not None:
                assert (f"::{name}`*" in row) == (name in slow), name
