"""Beat's dispenser task beside a dispenser of its own process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from callqueue import Rule, SlidingWindow, tasks
from callqueue.dispatch import dispenser
from callqueue.dispatch.dispenser import Dispenser
from callqueue.ledger import ledger_time
from callqueue.models import DispenserState

Rules = Callable[..., None]


@pytest.fixture
def ran(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the dispensers that ran in beat's task."""
    rules(r=Rule(limits=[SlidingWindow("10/h")]))
    names: list[str] = []
    monkeypatch.setattr(tasks, "_dispensers", {})
    monkeypatch.setattr(dispenser, "_told", {})
    monkeypatch.setattr(Dispenser, "run", lambda self, **_: names.append(self.name))
    return names


def steady(**options: Any) -> Dispenser:
    """A dispenser of its own process, as the command makes one, after its first turn."""
    dispenser = Dispenser(publish=lambda *_: True, name="of its own", **options)
    dispenser.membership.kind = "" if options else "steady"
    dispenser.run_once()
    return dispenser


@pytest.mark.parametrize(
    ("other", "count"),
    [("is there", 0), ("ended", 1), ("is silent", 1), ("was never there", 1), ("has one rule", 1), ("has other rules", 1)],
)  # fmt: skip
def test_it_dispenses_where_nobody_else_does_and_says_that_beat_runs(
    ran: list[str], rules: Rules, other: str, count: int
) -> None:
    dispenser = steady(**({"rules": ["r"]} if other == "has one rule" else {}))
    if other == "ended":
        dispenser.leave()
    elif other == "is silent":
        long_ago = ledger_time.now("default") - timedelta(seconds=21)
        DispenserState.objects.update(seen_at=long_ago)
    elif other == "was never there":
        DispenserState.objects.all().delete()
    elif other == "has other rules":
        rules(r=Rule(limits=[SlidingWindow("10/h")]), another=Rule())
    tasks.dispense()
    assert len(ran) == count
    if not count:
        assert DispenserState.objects.filter(kind="beat", digest="").count() == 1


def test_the_command_is_steady_and_what_runs_for_a_while_or_for_some_rules_is_not(
    rules: Rules,
) -> None:
    rules(r=Rule())

    class Stop:
        is_over = False

        def is_set(self) -> bool:
            self.is_over, was = True, self.is_over
            return was

        def wait(self, seconds: float) -> bool:
            return True

    def kind(seconds: float | None, **how: Any) -> str:
        dispenser = Dispenser(publish=lambda *_: True, **how)
        dispenser.run(stop=Stop(), seconds=seconds)  # type: ignore[arg-type]
        return DispenserState.objects.get(pk=dispenser.name).kind

    assert [kind(None), kind(60.0), kind(None, rules=["r"])] == ["steady", "", ""]
