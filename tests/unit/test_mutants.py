"""What `make mutants` puts wrong: every place of a function that a slip may be in, and no other."""

from __future__ import annotations

import ast

from tests.mutants.mutations import mutants

SOURCE = b'''LIMIT = 3


def admit(calls: int, at: float = 1.0) -> bool:
    """At most three."""
    if calls < LIMIT and not is_held(at):
        events.emit("admitted", calls=calls)
        charge(calls, at=at)
        count = calls + 1
        save(count)
        return True
    return False
'''


def test_each_is_one_slip_in_a_function() -> None:
    found = {(one.was, one.text) for one in mutants(SOURCE)}
    assert found == {
        ("calls < LIMIT and not is_held(at)", "(calls < LIMIT or not is_held(at))"),
        ("calls < LIMIT", "(calls <= LIMIT)"),
        ("not is_held(at)", "(is_held(at))"),
        ("charge(calls, at=at)", "charge(calls)"),
        ("charge(calls, at=at)", "pass"),
        (
            "charge(calls, at=at)\n        count = calls + 1",
            "count = calls + 1\n        charge(calls, at=at)",
        ),
        ("calls + 1", "(calls - 1)"),
        ("1", "2"),
        ("count = calls + 1\n        save(count)", "save(count)\n        count = calls + 1"),
        ("save(count)", "pass"),
        ("return True", "return None"),
        ("True", "False"),
        ("return False", "return None"),
        ("False", "True"),
    }


def test_each_can_be_read() -> None:
    for one in mutants(SOURCE):
        changed = one.applied(SOURCE)
        assert changed != SOURCE
        ast.parse(changed)
