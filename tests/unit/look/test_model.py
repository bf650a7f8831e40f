"""What is seen of a rule in one look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from callqueue.look.model import RuleLook


@pytest.mark.parametrize(
    ("opens", "waited_for", "place"),
    [
        ([5, 9], "", 1),
        ([9, None], "", 1),  # nobody knows when: with an answer
        ([None, 9], "", 0),
        ([None, 9], "1", 1),
        ([9, 5], "2", 0),  # that one is full no more
        ([9, "some free"], "", 0),  # less than a call costs
    ],
)
def test_the_limit_that_the_pass_waited_for_keeps_calls_back_or_the_last_to_open(
    opens: list[Any], waited_for: str, place: int
) -> None:
    full, free = SimpleNamespace(is_full=True), SimpleNamespace(is_full=False)
    limits = [
        SimpleNamespace(
            budget=SimpleNamespace(id=str(number)),
            opens_at=None if at == "some free" else at,
            free=4 if at == "some free" else 0,
        )
        for number, at in enumerate([*opens, 99])
    ]
    seen: Any = SimpleNamespace(limits=limits, gates=[full, full, free], waited_for=waited_for)
    assert RuleLook.binding.fget(seen) is limits[place]  # type: ignore[attr-defined]
