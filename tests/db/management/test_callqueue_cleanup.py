"""callqueue_cleanup: recovers, prunes, reclaims space."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from callqueue import FixedWindow, Rule, SlidingWindow, control, database, states
from callqueue.dispatch.dispenser import give_sign_of_life
from callqueue.ledger import ledger_time
from callqueue.limits.kinds import SECOND
from callqueue.maintenance import cleanup
from callqueue.models import CallAttempt, CallQueue, DispenserState
from tests.db.commands import run
from tests.support.behaviour import move_ledger, release, send

Rules = Callable[..., None]
Status = CallQueue.Status
DAY = FixedWindow("100/d")
DAY_US = 86400 * SECOND
CALL = {"method": "get", "params": {"url": "http://vendor.example/"}}


@pytest.fixture(autouse=True)
def one_rule(rules: Rules) -> None:
    rules(r=Rule())


def ended(status: int, days_ago: float) -> CallQueue:
    call = send("r")
    at = timezone.now() - timedelta(days=days_ago)
    CallQueue.objects.filter(pk=call.pk).update(status=status, finished_at_dt=at, ready=False)
    at -= ledger_time.moved("default") * database.MICROSECOND
    times = dict.fromkeys(("released_at", "sent_at", "finished_at"), at)
    CallAttempt.objects.create(call=call, number=1, rule="r", outcome=states.SUCCEEDED, **times)
    return call


def test_calls_past_their_retention_are_deleted_or_older_than_what_is_said() -> None:
    ended(Status.DONE, 8), ended(Status.FAILED, 31)
    kept = {ended(Status.DONE, 6).pk, ended(Status.FAILED, 8).pk, send("r").pk}
    ran = run("cleanup")
    assert ran.code == 0
    gone = "2 calls, 2 attempts of calls that are gone, 0 ended holds"
    assert ran.out == f"recovered 0 calls, deleted {gone}\n"
    assert set(CallQueue.objects.values_list("pk", flat=True)) == kept
    CallQueue.objects.all().delete()
    for status in states.FINAL:
        ended(status, 2)
    kept = {ended(Status.DONE, 0.5).pk, send("r").pk}
    assert "deleted 5 calls" in run("cleanup", "--older-than", "1d", "--batch-size", "2").out
    assert set(CallQueue.objects.values_list("pk", flat=True)) == kept


def test_lost_calls_are_recovered_first_and_a_dry_run_only_says_what_would_go() -> None:
    ended(Status.DONE, 8)
    CallQueue.objects.filter(pk=ended(Status.DONE, 9).pk).delete()
    call = send("r")
    release()
    CallAttempt.objects.open().update(lease_until=ledger_time.now("default") - timedelta(hours=1))
    gone = "1 call, 2 attempts of calls that are gone"
    assert run("cleanup", "--dry-run").out.startswith(f"would delete {gone}")
    assert (CallQueue.objects.count(), CallAttempt.objects.count()) == (2, 3)
    assert run("cleanup").out.startswith(f"recovered 1 call, deleted {gone}")
    call.refresh_from_db()
    assert call.status == Status.NEW


@pytest.mark.django_db(transaction=True)
def test_what_a_vacuum_has_freed_is_used_again() -> None:
    """Of the indexes too: one vacuum would leave their pages unused until the next, and twice their
    size needed.
    """
    if connection.vendor != "postgresql":
        pytest.skip("the sizes of indexes are PostgreSQL's")
    storage = "ALTER TABLE callqueue_callqueue {}"
    # one of those would do for a missing one of ours
    database.run("default", storage.format("SET (autovacuum_enabled = off)"))
    sizes: list[int] = []
    try:
        for _ in range(3):
            CallQueue.objects.send_many([CALL] * 4000, rule="r")
            CallQueue.objects.update(
                status=Status.DONE, ready=False, finished_at_dt=timezone.now() - timedelta(hours=1)
            )
            sizes += database.rows("default", "SELECT pg_indexes_size('callqueue_callqueue')")[0]
            with connection.execute_wrapper(after_all_that_could_see_it):
                done = cleanup.clean("default", older_than=timedelta(seconds=1), vacuum=True)
                assert done.calls == 4000
    finally:
        database.run("default", storage.format("RESET (autovacuum_enabled)"))
    assert max(sizes) < 1.2 * sizes[0]


def after_all_that_could_see_it(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
    """Let a VACUUM wait until no session of the server, whosever it is, may still see what is
    deleted: it would keep that.
    """
    if sql.startswith("VACUUM"):
        newest = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        now = database.rows("default", newest)[0][0] % 2**32
        end = time.monotonic() + 60
        while database.rows("default", OLDER, [now, now])[0][0]:
            if time.monotonic() > end:
                pytest.skip("another session of the server has had a snapshot for a minute")
            time.sleep(0.005)
    return execute(sql, *rest)


OLDER = """SELECT COUNT(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid()
    AND (backend_xmin::text::bigint < %s OR backend_xid::text::bigint < %s)"""


def test_attempts_are_kept_as_long_as_a_limit_of_their_own_rule_counts_them(rules: Rules) -> None:
    """As operators have changed it, too: what was deleted by the settings' window would not be
    counted in a longer one.
    """
    rules(
        r=Rule(limits=[SlidingWindow("20/s")]),
        changed=Rule(limits=[SlidingWindow("20/s")]),
        daily=Rule(limits=[DAY]),
    )
    control.change_limit("default", "changed", "changed#0", "20/h")
    for call in (ended(Status.DONE, 0.01) for _ in range(4)):
        rule = ("r", "changed", "daily", "of settings that are gone")[call.pk % 4]
        CallAttempt.objects.filter(call=call).update(rule=rule)
    counted = set(CallAttempt.objects.values_list("rule", flat=True))
    cleanup.clean("default", older_than=timedelta(seconds=1))
    assert not CallQueue.objects.exists()
    assert set(CallAttempt.objects.values_list("rule", flat=True)) == counted - {"r"}
    CallAttempt.objects.update(
        finished_at=ledger_time.now("default") - timedelta(hours=1, minutes=2)
    )
    assert cleanup.clean("default").attempts == 1
    assert "changed" not in CallAttempt.objects.values_list("rule", flat=True)


@pytest.mark.parametrize("recovers", [True, False])
def test_in_a_callers_transaction_it_goes_by_no_clock_that_nobody_has_judged(
    rules: Rules, request: Any, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    """The clock was set forward by a day just before this process began. Those that saw it set
    ledger time right soon after; until then what the limit counts seems to be long over, and what
    is under way to have fallen silent.
    """
    # what this makes of the clock is nothing that the next test should judge by
    request.addfinalizer(partial(ledger_time.forget_readings, is_new=False))
    rules(r=Rule(limits=[SlidingWindow("20/h")]))
    orphan, known = ended(Status.DONE, 0.01), ledger_time.moved("default")
    orphan.delete()
    send("r")
    release()
    now = ledger_time.now("default")
    lease = now + timedelta(minutes=2)
    CallAttempt.objects.open().update(started_at=now, worker="w", lease_until=lease)
    give_sign_of_life("default", "d", "steady")
    before = Counter({model: model.objects.count() for model in (CallAttempt, DispenserState)})
    move_ledger((known - DAY_US) / SECOND)
    ledger_time.forget_readings()

    def sleep(seconds: float) -> None:
        assert seconds <= ledger_time.SETTLED
        move_ledger(known / SECOND)

    monkeypatch.setattr(ledger_time, "time", SimpleNamespace(sleep=sleep))
    if recovers:
        assert run("cleanup").code == 0
    else:
        cleanup.clean("default")
    assert CallAttempt.objects.open().count() == 1
    assert before == {model: model.objects.count() for model in before}


def test_attempts_whose_call_is_gone_are_found_stretch_by_stretch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that ended long ago go; attempts that are open, that a limit may still count, or that
    have their call stay.
    """
    calls = [ended(Status.DONE, 1) for _ in range(8)] + [ended(Status.DONE, 0)]
    open_one = CallAttempt.objects.create(
        call=calls[0], number=2, rule="r", released_at=ledger_time.now("default")
    )
    CallQueue.objects.filter(pk__in=[call.pk for call in calls if call is not calls[3]]).delete()
    assert cleanup.clean("default", dry_run=True).attempts == 7
    assert cleanup.clean("default", batch_size=2).attempts == 7
    assert set(CallAttempt.objects.values_list("call_id", "pk")) >= {(calls[0].pk, open_one.pk)}
    kept = {calls[place].pk for place in (0, 3, 8)}
    assert set(CallAttempt.objects.values_list("call_id", flat=True)) == kept


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("option", ["--vacuum", "--vacuum-full"])
def test_space_is_reclaimed_and_a_full_vacuum_says_what_it_locks(option: str, rules: Rules) -> None:
    ended(Status.DONE, 8)
    with CaptureQueriesContext(connection) as made:
        ran = run("cleanup", option, "--no-progress")
    assert [one["sql"] for one in made].count("VACUUM") <= 1, "SQLite's is of all tables"
    assert ran.code == 0
    assert ("locks each against all reading and writing" in ran.out) == (option == "--vacuum-full")
    assert "vacuumed" in ran.out
