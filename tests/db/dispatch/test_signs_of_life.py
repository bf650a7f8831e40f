"""A dispenser's signs of life: a database that has forgotten one was put back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from callqueue import Rule, SlidingWindow
from callqueue.dispatch.dispenser import (
    OwnSign,
    give_sign_of_life,
    has_database_gone_back,
    hold_everything,
)
from callqueue.ledger import ledger_time
from callqueue.maintenance import cleanup
from callqueue.models import CallAttempt, DispenserState, Hold
from tests.support.behaviour import release, send

Rules = Callable[..., None]
WIDE = SlidingWindow("10000/s")


def test_a_row_that_is_gone_from_a_ledger_that_is_whole_is_no_backup(rules: Rules) -> None:
    """Somebody emptied the table of dispensers: the newest attempt of the sign is still there."""
    rules(default=Rule(limits=[WIDE]))
    send()
    release()
    sign = give_sign_of_life("default", "me:1")
    assert not has_database_gone_back("default", "me:1", sign), "it is remembered"
    DispenserState.objects.all().delete()
    assert not has_database_gone_back("default", "me:1", sign)
    earlier = sign.at - timedelta(minutes=1)
    CallAttempt.objects.update(released_at=earlier)  # another attempt, of the same number
    assert has_database_gone_back("default", "me:1", sign)


@pytest.mark.parametrize(
    ("limit", "days", "is_held"), [("5/h", 2, False), ("5/h", 0.5, True), ("5/7d", 2, True)]
)
def test_a_dispenser_that_was_frozen_until_others_forgot_it(
    rules: Rules, limit: str, days: float, is_held: bool
) -> None:
    """As long as something may count, dispensers are remembered, and a missing row tells."""
    rules(default=Rule(limits=[SlidingWindow(limit)]))
    frozen = OwnSign(ledger_time.now("default") - timedelta(days=days), None)
    DispenserState.objects.create(name="me:1", started_at=frozen.at, seen_at=frozen.at)
    cleanup.clean("default")
    assert DispenserState.objects.filter(name="me:1").exists() is is_held
    assert not has_database_gone_back("default", "me:1", frozen)
    DispenserState.objects.filter(name="me:1").delete()
    assert has_database_gone_back("default", "me:1", frozen) is is_held


@pytest.mark.parametrize(("lost", "has_gone"), [(0.3, False), (4, True)])
def test_a_sign_that_was_put_right_with_a_jump_is_no_backup(
    rules: Rules, lost: float, has_gone: bool
) -> None:
    """Who puts it right takes it for his now, which is a little earlier."""
    rules(default=Rule(limits=[WIDE]))
    sign = give_sign_of_life("default", "me:1")
    ledger_time.ensure_rows("default")
    ledger_time.set_back("default", ledger_time.read("default"), 1000)
    DispenserState.objects.update(seen_at=sign.at - timedelta(seconds=lost))
    assert has_database_gone_back("default", "me:1", sign) is has_gone


@pytest.mark.parametrize("remembers", ["an older sign", "nothing"])
def test_a_database_that_forgot_a_sign_has_gone_back(rules: Rules, remembers: str) -> None:
    """Every rule is held for its longest window, or as long as a call may take."""
    rules(
        slow=Rule(limits=[SlidingWindow("5/h"), SlidingWindow("9/d")]),
        quick=Rule(total_timeout=7, limits=[WIDE]),
    )
    send("quick")
    release()
    sign = give_sign_of_life("default", "me:1")
    if remembers == "nothing":
        DispenserState.objects.all().delete()
        CallAttempt.objects.all().delete()
    else:
        DispenserState.objects.update(seen_at=sign.at - timedelta(seconds=30))
    assert has_database_gone_back("default", "me:1", sign)
    now = ledger_time.now("default")
    hold_everything("default")
    left = {hold.rule: (hold.until - now).total_seconds() for hold in Hold.objects.all()}
    assert left == {
        "slow": pytest.approx(86400, abs=5),
        "quick": pytest.approx(37, abs=5),
        "default": pytest.approx(3600, abs=5),
    }
    send("quick")
    assert release() == []
