"""callqueue_audit: what it prints for people, and what is wrong use."""

from __future__ import annotations

from collections.abc import Callable

from callqueue import Rule, SlidingWindow
from tests.db.commands import run
from tests.support.history import paced

Rules = Callable[..., None]


def test_people_get_a_table(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    paced(5, 0.1)
    ran = run("audit")
    assert "5 attempts since" in ran.out
    assert "SlidingWindow 20/s" in ran.out


def test_one_attempt_is_no_plural(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    paced(1, 0.1)
    assert "1 attempt since" in run("audit").out


def test_an_audit_since_nonsense_is_wrong_use(rules: Rules) -> None:
    rules(r=Rule())
    assert run("audit", "--since", "yesterday").code == 2
