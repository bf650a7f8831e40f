"""What a group's memo keeps, against what a pass has found."""

from __future__ import annotations

import pytest

from callqueue.ledger.memo import promises_more

Room = dict[str, dict[str, int]]


@pytest.mark.parametrize(
    ("kept", "found", "is_more"),
    [
        ({"free": {"a": 1}}, {}, True),
        ({"free": {"a": 2, "b": 2}}, {"free": {"a": 2, "b": 1}}, True),
        ({"free": {"a": 1}}, {"free": {"a": 1}}, False),
        ({"free": {"a": 0}}, {}, False),
        ({}, {"free": {"a": 1}}, False),
    ],
)
def test_room_that_is_kept_is_more_where_any_budget_has_more(
    kept: Room, found: Room, is_more: bool
) -> None:
    assert promises_more(kept, found) is is_more
