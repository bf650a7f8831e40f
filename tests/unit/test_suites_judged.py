"""The table of expected differences bites: in both directions, and where it names what is not
there.
"""

from __future__ import annotations

from pathlib import Path

from tests.suites.judged import Verdicts, by_reason, complaints, read

REPORT = """<testsuites><testsuite>
<testcase classname="t.test_a.test_x" name="test_ok"/>
<testcase classname="t.test_a.test_x" name="test_bad[1]"><failure message="broke"/></testcase>
<testcase classname="t.test_a.test_x" name="test_error"><error message="no set-up"/></testcase>
<testcase classname="t.test_a.test_x" name="test_left"><skipped/></testcase>
</testsuite></testsuites>"""


def verdicts(tmp_path: Path) -> Verdicts:
    (tmp_path / "report.xml").write_text(REPORT)
    return read(tmp_path / "report.xml")


def test_a_report_is_read(tmp_path: Path) -> None:
    found = verdicts(tmp_path)
    assert found.passed == {"test_x::test_ok"}
    assert found.failed == {"test_x::test_bad[1]": "broke", "test_x::test_error": "no set-up"}
    assert found.skipped == {"test_x::test_left"}
    assert found.counts() == "1 of 3 pass"


def test_what_the_table_does_not_say_is_a_complaint(tmp_path: Path) -> None:
    found = verdicts(tmp_path)
    known = {"test_x::test_bad": "a reason", "test_x::test_error": "another"}
    assert complaints(found, known) == []
    assert complaints(found, {"test_x::test_bad": "a reason"}) == [
        "test_x::test_error failed: no set-up"
    ]
    (passed,) = complaints(found, {**known, "test_x::test_ok": "it should fail"})
    assert passed.startswith("test_x::test_ok passed")
    (gone,) = complaints(found, {**known, "test_x::test_gone": "why"})
    assert gone == "test_x::test_gone is listed, and was not run"
    assert "a reason" in by_reason(found, known)
