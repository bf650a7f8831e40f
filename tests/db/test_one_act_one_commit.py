"""One act is one commit: all acts, cut at each statement, are done or not done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.db import DatabaseError, connection
from django.db.backends.base.base import BaseDatabaseWrapper

import callqueue
from callqueue import Rule, SlidingWindow, broker, control, database, states, transitions
from callqueue.control import bulk
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.execution import claim, judging, recorder
from callqueue.ledger import ledger_time
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, Hold, KeyTurn
from callqueue.outcome import HoldUntil
from callqueue.states import Move
from callqueue.transitions import Job
from tests.db import commands
from tests.support.behaviour import release, send
from tests.support.cutting import cut, deeds
from tests.support.length import AT_LENGTH

pytestmark = [pytest.mark.django_db(transaction=True)]
LIMIT = SlidingWindow("100/s", name="shared")
PAST = timedelta(minutes=10)
CALL = {"method": "get", "params": {"url": "http://vendor.example/"}}


@dataclass(frozen=True)
class Act:
    """What is there before, and the act. `commits`: of the act, where there is more than one."""

    prepare: Callable[[], Any]
    do: Callable[[Any], Any]
    commits: int = 1


def calls(count: int = 3) -> list[CallQueue]:
    return [send("r", callback="tests.echo") for _ in range(count)]


def ended(status: int) -> Callable[[], list[CallQueue]]:
    def prepare() -> list[CallQueue]:
        made = [send("r", unique_key=key) for key in ("a", "b")]
        rows = CallQueue.objects.filter(pk__in=[one.pk for one in made])
        now = database.clock("default")
        rows.update(status=status, ready=False, finished_at_dt=now)
        return list(rows)

    return prepare


def released() -> list[int]:
    calls(2)
    release()
    return list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True))


def begun() -> list[Job]:
    return claim.begin("default", released())


def silent() -> None:
    begun()
    CallAttempt.objects.update(lease_until=ledger_time.now("default") - PAST)


def unbegun() -> None:
    released()
    CallAttempt.objects.update(lease_until=ledger_time.now("default") - PAST)


def expired() -> None:
    calls()
    CallQueue.objects.update(expires_at_dt=database.clock("default") - PAST)


def paused() -> None:
    calls()
    control.pause("default", "r")


def held_thrice() -> None:
    paused()
    control.pause("default", "r", key="a")
    control.pause("default", "r", key="b")


def held_keys() -> None:
    """A call of a key that a pass found held, so that its turn sleeps until the hold is lifted."""
    send("r", key="a")
    control.pause("default", "r", key="a")
    make_pass("default", ["other", "r"])
    assert KeyTurn.objects.exclude(blocked_on="").exists()


def record(jobs: list[Job]) -> None:
    recorder.record(
        "default", [transitions.after_failure(j, "500", j.ledger_time_now()) for j in jobs]
    )


def throttled(jobs: list[Job]) -> None:
    recorder.record("default", [judging.result_of_value(jobs[0], HoldUntil(60.0, "busy"))])


def tell(jobs: list[Job]) -> None:
    rows = [
        {"pk": job.attempt.id, "worker": job.attempt.worker, "sent_at": job.ledger_time_now()}
        for job in jobs
    ]
    transitions.tell_when_sent("default", rows)


def entered() -> Any:
    permit = callqueue.permit("r", cost=5)
    return permit, permit.__enter__()


def left() -> Any:
    permit, granted = entered()
    permit.__exit__(None, None, None)
    return granted


def enter(_: Any) -> None:
    callqueue.permit("r", wait=0).__enter__()


def leave(given: Any) -> None:
    given[0].__exit__(None, None, None)


def leave_for_less(given: Any) -> None:
    given[1].settle(2)
    leave(given)


def logged(changed: Any, before: Any) -> None:
    """What else is written with a batch, in its transaction."""
    CallQueue.objects.filter(pk__in=[one.pk for one in changed]).update(error_message="by hand")


def in_batch(move: Move) -> Callable[[Any], Any]:
    return lambda _: list(bulk.move_in_batches(CallQueue.objects.all(), move, logged))


ACTS = {
    "send": Act(lambda: None, lambda _: send("r")),
    "send with a key": Act(lambda: None, lambda _: send("r", unique_key="a")),
    "send many": Act(
        lambda: None, lambda _: CallQueue.objects.send_many([CALL] * 5, rule="r", batch_size=2)
    ),
    "cancel": Act(calls, lambda made: made[0].cancel()),
    "cancel what is released": Act(released, lambda _: CallQueue.objects.first().cancel()),
    "cancel all": Act(released, lambda _: CallQueue.objects.all().cancel()),
    "cancel in bulk": Act(released, in_batch(Move.CANCEL)),
    "requeue": Act(ended(states.FAILED), lambda made: made[0].requeue()),
    "requeue all": Act(ended(states.FAILED), lambda _: CallQueue.objects.all().requeue()),
    "requeue in bulk": Act(ended(states.UNKNOWN), in_batch(Move.REQUEUE)),
    "settle": Act(
        ended(states.UNKNOWN),
        lambda made: transitions.end_unknown("default", made[0], states.DONE, "it was made"),
    ),
    "send again": Act(
        ended(states.UNKNOWN), lambda made: transitions.requeue_unknown("default", made[0], 5.0)
    ),
    "pause": Act(calls, lambda _: control.pause("default", "r", seconds=60)),
    "pause what is paused": Act(paused, lambda _: control.pause("default", "r", seconds=60)),
    "pause a key": Act(calls, lambda _: control.pause("default", "r", key="a")),
    "resume": Act(held_thrice, lambda _: control.resume("default", "r")),
    "resume a key": Act(held_keys, lambda _: control.resume("default", "r")),
    "change a limit": Act(calls, lambda _: control.change_limit("default", "r", "shared", "50/s")),
    "release": Act(calls, lambda _: make_pass("default", ["other", "r"])),
    "begin": Act(released, lambda ids: claim.begin("default", ids)),
    "tell": Act(begun, tell),
    "record": Act(begun, record),
    # The hold first: from then on none goes that the provider would refuse too.
    "record a refusal": Act(begun, throttled, commits=2),
    "take back what nobody began": Act(unbegun, lambda _: recovery.void_unbegun("default")),
    "end what fell silent": Act(silent, lambda _: recovery.end_lost("default")),
    "expire": Act(expired, lambda _: recovery.expire("default")),
    "enter a permit": Act(lambda: None, enter),
    "tell of a permit": Act(entered, lambda given: given[1].sent()),
    "hold by a permit": Act(entered, lambda given: given[1].hold(60.0, "busy")),
    "leave a permit": Act(entered, leave),
    "leave a permit that cost less": Act(entered, leave_for_less),
    "settle a permit that has ended": Act(left, lambda granted: granted.settle(50)),
}


@pytest.fixture(autouse=True)
def _rules(rules: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is announced is announced elsewhere, and later."""
    rules(r=Rule(limits=[LIMIT]), other=Rule(limits=[LIMIT]))
    monkeypatch.setattr(broker, "send_beside", lambda name, args, queue="": None)


def begin_anew(act: Act) -> Any:
    """Nothing but what the act finds, and a dispenser that was there."""
    for model in apps.get_app_config("callqueue").get_models():
        model._default_manager.all().delete()
    Dispenser("default").run_once()
    left()
    CallAttempt.objects.all().delete()
    return act.prepare()


# Of each row: what names it, what it is done by, and what passes note for themselves.
PASSING = [
    "id",
    "call_id",
    "idempotency_key",
    "worker",
    "name",
    "passes",
    "memo",
    "served",
    "blocked_until",
    "version",
]
WATCHED = [
    "CallQueue",
    "CallAttempt",
    "Hold",
    "KeyTurn",
    "RuleState",
    "BelatedEnding",
    "OpinionState",
    "SettingsState",
]


def state() -> list[Any]:
    """All rows, but for which instant it was, and which version."""
    found = []
    for name in WATCHED:
        rows = apps.get_model("callqueue", name)._default_manager.order_by("pk")
        for row in rows.values():
            shown = {
                column: value is not None if isinstance(value, datetime | None) else str(value)
                for column, value in row.items()
                if column not in PASSING
            }
            found.append((name, sorted(shown.items())))
    return found


@contextmanager
def commits() -> Iterator[list[str]]:
    """What is committed that was changed: of each commit, the first statement that changed it."""
    made: list[str] = []
    changed: list[str] = []
    commit, roll_back = BaseDatabaseWrapper._commit, BaseDatabaseWrapper._rollback

    def statement(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        answer = execute(sql, params, many, context)
        is_change = sql.lstrip("( ").upper().startswith(("INSERT", "UPDATE", "DELETE", "WITH"))
        if is_change and (context["cursor"].rowcount or " RETURNING " in sql):
            (changed if connection.in_atomic_block else made).append(sql[:200])
        return answer

    def committing(self: Any) -> Any:
        made.extend(changed[:1])
        changed.clear()
        return commit(self)

    def rolling_back(self: Any) -> Any:
        changed.clear()
        return roll_back(self)

    with pytest.MonkeyPatch.context() as patch, connection.execute_wrapper(statement):
        patch.setattr(BaseDatabaseWrapper, "_commit", committing)
        patch.setattr(BaseDatabaseWrapper, "_rollback", rolling_back)
        yield made


@pytest.mark.parametrize("name", ACTS)
def test_an_act_is_one_commit(name: str) -> None:
    act = ACTS[name]
    given = begin_anew(act)
    before = state()
    with commits() as made:
        act.do(given)
    assert state() != before, "it did nothing"
    assert len(made) == act.commits, made


def struck(act: Act, place: int, deed: str = "") -> Iterator[str]:
    """Do the act cut at its first moment, the next, ...; each moment. `make test`: every fourth."""
    number, step = (1, 1) if os.environ.get(AT_LENGTH) else (1 + place % 4, 4)
    while True:
        given = begin_anew(act)
        with (
            cut(number, deed or deeds()[number % len(deeds())]) as made,
            suppress(DatabaseError, callqueue.exceptions.CallQueueError),
        ):
            act.do(given)
        transitions.end_deferred("default")  # while a cut connection lets its rows go
        yield made.story
        if not made.came:
            return
        number += step


@pytest.mark.fault
@pytest.mark.parametrize("name", [name for name, act in ACTS.items() if act.commits == 1])
def test_an_act_that_is_cut_anywhere_is_done_or_not(name: str) -> None:
    act = ACTS[name]
    given = begin_anew(act)
    before = state()
    act.do(given)
    after = state()
    for story in struck(act, list(ACTS).index(name)):
        assert state() in (before, after), story


def old() -> None:
    """Calls that ended so long ago that cleanup takes them, one that waits, and a hold."""
    made, long_ago = calls(4), database.clock("default") - timedelta(days=400)
    ends = (states.DONE, states.FAILED, states.UNKNOWN)
    for call, status in zip(made[1:], ends, strict=True):
        rows = CallQueue.objects.filter(pk=call.pk)
        rows.update(status=status, finished_at_dt=long_ago, ready=False)
        times = {"released_at": long_ago, "finished_at": long_ago, "outcome": "succeeded"}
        CallAttempt.objects.create(call=call, number=1, rule="r", queue="q", **times)
    Hold.objects.create(rule="r", per="rule", value="", until=long_ago, began_at=long_ago)


COMMANDS = {
    "cleanup --older-than 30d": old,
    "requeue --status failed": ended(states.FAILED),
    "cancel --all": calls,
    "status --json": calls,
    "simulate --rule r --calls 10": calls,
    "audit": old,
    "pause r": calls,
    "resume r": held_thrice,
}


@pytest.mark.fault
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_is_cut_anywhere_is_done_all_the_same(line: str) -> None:
    """Its connection is cut: that it does its work again after a conflict follows."""

    def run(_: Any) -> None:
        assert commands.run(*line.split()).code == 0

    act = Act(COMMANDS[line], run)
    run(begin_anew(act))
    after, stories = state(), list[str]()
    for story in struck(act, list(COMMANDS).index(line), deeds()[0]):
        stories.append(story)
        assert state() == after, story
    assert any(stories), "nothing was cut"


def test_a_file_of_calls_that_is_cut_anywhere_is_sent_once_or_not_at_all(tmp_path: Path) -> None:
    """A command that cannot know whether it was done says so, and does not do it again."""
    path = tmp_path / "calls"
    path.write_text(f"{json.dumps(CALL)}\n" * 3)
    ran: list[commands.Ran] = []
    act = Act(lambda: None, lambda _: ran.append(commands.run("send", "--rule", "r", str(path))))
    for story in struck(act, 0):
        count = CallQueue.objects.count() - 1  # of the permit that was there
        assert count in (0, 3) and ran[-1].code in ((0, 1) if story else (0,)), story
        assert count == 3 or ran[-1].code == 1, story
