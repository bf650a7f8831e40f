"""Releases: which calls go, in which order, under which limits. Nothing is made here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from callqueue import Concurrency, Rule, SlidingWindow, TokenBucket, conf, states
from callqueue.dispatch import release_pass
from callqueue.dispatch.next_look import NO_ROOM, Room
from callqueue.dispatch.release_pass import ensure_state_rows
from callqueue.history import audit
from callqueue.ledger import account, ledger_time, ready_calls
from callqueue.limits import kinds
from callqueue.look import look
from callqueue.models import CallAttempt, CallQueue, KeyTurn, RuleState
from tests.db.ledger.test_clock_jumps import Clocks, answer_all, at_command
from tests.support.behaviour import release, send
from tests.support.ledger import CALL, answer
from tests.support.new_kind import Spaced

Rules = Callable[..., None]


def waiting_calls(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, rule: Rule, calls: Sequence[Any]
) -> Clocks:
    """These calls wait under rule r; a clock in the test's hands."""
    clock = at_command(monkeypatch)
    rules(r=rule)
    ensure_state_rows("default", list(conf.current().rules))
    CallQueue.objects.send_many(calls, rule="r")
    CallQueue.objects.update(due_at_dt=clock.wall, ready=True)
    ledger_time.watch("default").look()
    clock.pass_by(1)
    return clock


def test_a_limit_counts_all_that_is_open_however_much_that_is(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "SAMPLE", 2)
    rules(r=Rule(limits=[Concurrency(5)]), s=Rule(limits=[Concurrency(3, per="queue")]))
    for rule in "rs" * 8:
        send(rule)
    assert [len(release()) for _ in range(3)] == [8, 0, 0]


def test_deleting_a_call_makes_no_room(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    send("r")
    (released,) = release()
    released.delete()
    send("r")
    assert release() == []


def test_higher_priority_first_then_the_order_of_being_due(rules: Rules) -> None:
    """What is not due keeps nobody back; what other code made goes, what it ended does not."""
    rules(r=Rule(limits=[SlidingWindow("4/m")]))
    later = send("r", priority=9, not_before=timezone.now() + timedelta(hours=1))
    low, high, middle = send("r"), send("r", priority=9), send("r", priority=5)
    late, cancelled, deleted = (send("r", priority=9) for _ in range(3))
    CallQueue.objects.filter(pk=late.pk).update(due_at_dt=F("due_at_dt") - timedelta(minutes=1))
    CallQueue.objects.filter(pk=cancelled.pk).update(status=states.CANCELLED)
    deleted.delete()
    made = CallQueue.objects.create(rule="r", priority=1, call_data=CALL)
    assert release() == [late, high, middle, made]
    assert low.status == states.NEW
    answer(ago=3600)
    CallQueue.objects.filter(pk=later.pk).update(due_at_dt=timezone.now() - timedelta(seconds=1))
    assert release() == [later, low]


def test_a_call_that_other_code_postpones_waits_until_then(rules: Rules) -> None:
    """It was ready by then, and nothing but its column says that it no longer is."""
    rules(r=Rule())
    calls = [send("r") for _ in range(6)]
    later = timezone.now() + timedelta(hours=1)
    CallQueue.objects.filter(pk=calls[0].pk).update(due_at_dt=later)
    CallQueue.objects.filter(pk=calls[1].pk).update(due_at_dt=F("due_at_dt") + timedelta(hours=1))
    for call in calls[2:]:
        call.due_at_dt = later
    CallQueue.objects.bulk_update([calls[2]], ["due_at_dt"])
    for call, fields in zip(calls[3:], (None, ["due_at_dt"], {"due_at_dt", "rule"}), strict=True):
        call.save(update_fields=fields)
    assert release() == []
    CallQueue.objects.update(due_at_dt=timezone.now() - timedelta(hours=1))
    assert release() == calls


def test_all_limits_must_admit_a_call(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m"), Concurrency(3), SlidingWindow("2/h")]))
    for _ in range(6):
        send("r")
    assert len(release()) == 2
    answer(ago=61)
    assert release() == [], "the longest of them still counts those"


def test_limits_in_different_units_are_all_charged_within_a_pass(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("9/m"), SlidingWindow("100/m", unit="tokens")]))
    for tokens in (10, 60, 60, 60):
        send("r", cost={"tokens": tokens})
    assert len(release()) == 2


def test_a_call_that_no_limit_could_ever_admit_fails_and_keeps_nobody_back(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("50/m")]))
    heavy, broken, sound = send("r", cost=40), send("r"), send("r")
    CallQueue.objects.filter(pk=broken.pk).update(cost="many")
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    assert release() == [sound]
    heavy.refresh_from_db()
    broken.refresh_from_db()
    assert heavy.status == broken.status == states.FAILED
    assert "40" in heavy.error_message
    assert "cost" in broken.error_message


def test_under_a_shared_budget_every_key_has_its_turn(rules: Rules) -> None:
    shared = SlidingWindow("1/s", name="account")
    rules(r=Rule(limits=[SlidingWindow("9/m", per="key"), shared]))
    for key in "abcdefghijklmnopqrstuvwxyz":
        send("r", key=key), send("r", key=key)
    served = []
    for _ in range(26):
        served += [call.key for call in release()]
        answer(ago=3600)
    assert sorted(served) == list("abcdefghijklmnopqrstuvwxyz")


def test_the_next_look_comes_before_the_slot_of_the_next_call(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released then, it goes ahead of its slot: the broker's time is none of the limit's."""
    clock = waiting_calls(
        rules, monkeypatch, Rule(limits=[SlidingWindow("1/m"), SlidingWindow("9/m")]), [CALL] * 2
    )
    assert len(release_pass.release("default", ["r"]).released) == 1
    answer_all(clock)
    clock.pass_by(release_pass.release("default", ["r"]).opens_in)
    assert len(release_pass.release("default", ["r"]).released) == 1
    attempt = CallAttempt.objects.open().get()
    assert attempt.send_at > attempt.released_at


def test_a_database_that_does_not_return_what_it_inserts_is_asked(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MySQL."""
    insert = release_pass.database.insert_each
    without = lambda *given: [None for _ in insert(*given)]  # noqa: E731
    monkeypatch.setattr(release_pass.database, "insert_each", without)
    rules(r=Rule())
    assert [send("r"), send("r")] == release()


def test_what_a_pass_does_not_come_to_is_not_said_to_wait_for_a_limit(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("9/m")]))
    for _ in range(3):
        send("r")
    ensure_state_rows("default", ["r"])
    assert len(release_pass.release("default", ["r"], batch=2).released) == 2
    assert RuleState.objects.get(rule="r").memo["binding"] == {}


@pytest.mark.parametrize(("per", "most"), [("rule", 1), ("queue", 2), ("key", 1)])
def test_a_new_kind_of_limit_goes_through_everything(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, per: str, most: int
) -> None:
    """It is kept, stated, shown, plotted and audited like any other."""
    monkeypatch.setitem(kinds.KINDS, "Spaced", Spaced)  # type: ignore[arg-type]
    rules(r=Rule(limits=[Spaced("4/h", per=per)], queues=["a", "b"]))
    for _ in range(5):
        send("r", key="k")
    assert (len(release()), len(release())) == (most, 0)
    assert CallAttempt.objects.open().count() == most
    rule = look("default").rule("r")
    (limit,) = rule.limits
    assert (limit.used, limit.free) == (most, 0)
    assert rule.drain_s()
    assert not CallQueue.objects.under_threshold("r", "k")
    assert not audit.audit("default", since=timedelta(hours=1)).over_limit
    assert CallQueue.objects.waiting()[0].forecast().reason


# --- Used up, with a long backlog: a pass reads no more calls than can go, and is not made before something
# can have changed. All of the limit is used.

MINUTE, LATENCY = 60.0, 0.3
WAITING = 1500
TOKENS = {"cost": {"tokens": 100}}
PER_MINUTE = SlidingWindow("9000/m", unit="tokens")


class Minute:
    """What a dispenser does in a minute, by its own reckoning of when to look again."""

    def __init__(self, clock: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.passes, self.released, self.rows = clock, 0, 0, 0
        found = ready_calls._lock_calls

        def candidates(*args: Any, **options: Any) -> Any:
            listed = found(*args, **options)
            self.rows += len(listed)
            return listed

        monkeypatch.setattr(ready_calls, "_lock_calls", candidates)

    def run(self) -> None:
        end, answers_at = self.clock.mono + MINUTE, None
        while self.clock.mono < end:
            if answers_at is not None and self.clock.mono >= answers_at:
                answer_all(self.clock)
                answers_at = None
            done = release_pass.release("default", ["r"])
            self.passes += 1
            self.released += len(done.released)
            if done.released and answers_at is None:
                answers_at = self.clock.mono + LATENCY
            look = done.next_look
            wakes = self.clock.mono + max(0.001, 0.05 if look.on_ready else look.after)
            if look.on_answer and answers_at is not None:
                wakes = min(wakes, answers_at)
            assert self.passes < 1000, f"{self.passes} passes, {self.rows} rows"
            self.clock.pass_by(wakes - self.clock.mono)


@pytest.mark.usefixtures("db", "trusted_workers")
@pytest.mark.parametrize(
    ("rule", "options", "keys", "most"),
    [
        (Rule(limits=[SlidingWindow("500/m"), PER_MINUTE]), TOKENS, 1, 90),
        (Rule(limits=[SlidingWindow("9000/61s", unit="tokens")]), TOKENS, 1, 90),  # tallied
        (Rule(limits=[TokenBucket("100/s", burst=3000, unit="tokens")]), TOKENS, 1, 60),
        (Rule(limits=[SlidingWindow("900/m")]), {"cost": 10}, 1, 90),
        (Rule(limits=[SlidingWindow("45/m", per="queue")], queues=["e1", "e2"]), {}, 1, 90),
        (Rule(limits=[SlidingWindow("900/m", unit="tokens", per="key")]), TOKENS, 10, 90),
    ],
    ids=["tokens", "tallied", "bucket", "costly", "queues", "tokens of keys"],
)
def test_a_backlog_behind_a_limit_that_is_used_up_costs_little(
    rules: Rules,
    monkeypatch: pytest.MonkeyPatch,
    rule: Rule,
    options: Mapping[str, Any],
    keys: int,
    most: int,
) -> None:
    names = [{"key": f"k{number}"} if keys > 1 else {} for number in range(keys)]
    calls = [{"call_data": CALL, **options, **one} for one in names for _ in range(WAITING // keys)]
    clock = waiting_calls(rules, monkeypatch, rule, calls)
    Minute(clock, monkeypatch).run()
    second = Minute(clock, monkeypatch)
    second.run()
    assert CallAttempt.objects.count() >= 2 * most * 0.95
    assert second.released >= most * 0.95
    assert second.passes < 4 * 60 + 2 * second.released
    assert second.rows < 4 * (second.released + second.passes)


def test_a_pass_that_looked_at_as_few_as_the_first_ones_cost_lets_go_goes_on(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/m", unit="tokens")]))
    for tokens in (60, 10, 10, 10):
        send("r", cost={"tokens": tokens})
    ensure_state_rows("default", ["r"])
    passes = [release_pass.release("default", ["r"]) for _ in range(2)]
    assert [len(one.released) for one in passes] == [2, 2]
    assert passes[0].next_look.goes_on


def test_whoever_has_room_for_one_kind_of_calls_alone_is_given_those_behind_the_others(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h")]))
    calls = [send("r") for _ in range(4)]
    CallQueue.objects.filter(pk__in=[one.pk for one in calls[:2]]).update(method="send_email")
    ensure_state_rows("default", ["r"])
    made = release_pass.release("default", ["r"], room=Room(http=9, handled=0))
    assert [one.id for one in made.released] == [one.pk for one in calls[2:]]


def test_a_pass_that_whoever_makes_the_calls_had_no_more_room_for_goes_on_once_he_has(
    rules: Rules,
) -> None:
    rules(r=Rule())
    for _ in range(2):
        send("r")
    ensure_state_rows("default", ["r"])
    look = release_pass.release("default", ["r"], room=Room(http=1, handled=1), batch=1).next_look
    assert (look.on_room, look.goes_on) == (True, False)


@pytest.mark.parametrize("limits", [[], [SlidingWindow("9/m")]])
def test_a_pass_for_whoever_has_no_room_waits_for_that_and_for_no_limit(
    rules: Rules, limits: Any
) -> None:
    rules(r=Rule(limits=limits))
    send("r")
    ensure_state_rows("default", ["r"])
    made = release_pass.release("default", ["r"], room=NO_ROOM)
    assert (made.released, made.next_look.on_room, made.next_look.goes_on) == ([], True, False)
    assert not RuleState.objects.get(rule="r").memo.get("binding")


@pytest.mark.parametrize("per", ["rule", "key"])
def test_of_several_full_limits_the_last_to_open_is_said_to_keep_a_call_back(
    rules: Rules, per: str
) -> None:
    rates = ("9/h", "1/m", "1/10s")
    rules(r=Rule(limits=[SlidingWindow(rate, per=per) for rate in rates]))
    send("r", key="k")
    assert len(release()) == 1
    answer()
    send("r", key="k")
    assert release() == []
    if per == "rule":
        assert RuleState.objects.get(rule="r").memo["binding"] == {"r": "r#1"}
    else:
        assert KeyTurn.objects.get().blocked_on == ready_calls.blocked_on_room(("r#1", "k"))
