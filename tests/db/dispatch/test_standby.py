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


def steady() -> Dispenser:
    """A dispenser of its own process, as the command makes one, after its first turn."""
    dispenser = Dispenser(publish=lambda *_: True, name="of its own")
    dispenser.membership.kind = "steady"
    dispenser.run_once()
    return dispenser


def ended(other: Dispenser) -> None:
    other.leave()


def silent(other: Dispenser) -> None:
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(seconds=21))


def never_there(other: Dispenser) -> None:
    DispenserState.objects.all().delete()


@pytest.mark.parametrize("is_gone", [ended, silent, never_there])
def test_it_dispenses_where_nobody_else_does(
    ran: list[str], is_gone: Callable[[Dispenser], None]
) -> None:
    is_gone(steady())
    tasks.dispense()
    assert len(ran) == 1


def test_it_leaves_the_work_to_a_dispenser_of_its_own_and_says_that_beat_runs(
    ran: list[str],
) -> None:
    steady()
    tasks.dispense()
    assert ran == []
    assert DispenserState.objects.filter(kind="beat", digest="").count() == 1


def test_one_with_other_settings_or_only_some_rules_is_not_enough(
    ran: list[str], rules: Rules
) -> None:
    steady()
    rules(r=Rule(limits=[SlidingWindow("10/h")]), another=Rule())
    tasks.dispense()
    assert len(ran) == 1
    some = Dispenser(rules=["r"], name="some", publish=lambda *_: True)
    some.run_once()
    tasks.dispense()
    assert len(ran) == 2


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
