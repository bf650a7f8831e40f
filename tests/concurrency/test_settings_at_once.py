"""Dispensers with different settings, at work at once; the provider counts every instant at which a
call was sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import pytest
from django.db import DatabaseError, connection

from callqueue import Rule, SlidingWindow, control, database, states
from callqueue.dispatch import release_pass
from callqueue.dispatch.release_pass import release
from callqueue.ledger import settings
from callqueue.models import CallAttempt, CallQueue, DispenserState, RuleState
from tests.support.dispensers import Process
from tests.support.processes import Processes
from tests.support.verdicts import Late

URL = {"method": "get", "params": {"url": "http://vendor.example/"}}
LOOSE, STRICT = Rule(limits=[SlidingWindow("40/s")]), Rule(limits=[SlidingWindow("2/s")])


@contextmanager
def at_work(*tasks: Callable[[threading.Event], None]) -> Iterator[None]:
    """These run in threads of their own until the block is left."""
    stop = threading.Event()

    def run(task: Callable[[threading.Event], None]) -> None:
        try:
            task(stop)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def working(dispenser: Process) -> Callable[[threading.Event], None]:
    return lambda stop: dispenser.run(stop=stop)


def worker(stop: threading.Event) -> None:
    """Makes every call as soon as it may be sent, and has its answer at once."""
    while not stop.is_set():
        try:
            now = database.clock("default")
            mine = CallAttempt.objects.open().exclude(send_at__gt=now)
            mine.update(started_at=now, sent_at=now, finished_at=now, outcome=states.SUCCEEDED)
        except DatabaseError:
            connection.close()
        stop.wait(0.002)


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise Late("it did not come about")
        time.sleep(0.01)


def registered(dispenser: Process) -> datetime:
    """The instant from which all go by what this one holds, too."""
    wait_for(lambda: dispenser.membership.book is not None)
    return database.clock("default")


def released_since(instant: datetime) -> list[datetime]:
    """When each call was sent that was released since, in order."""
    sent = CallAttempt.objects.filter(released_at__gt=instant, finished_at__isnull=False)
    return sorted(sent.values_list("finished_at", flat=True))


def most_in_a_second(instants: list[datetime]) -> int:
    return max(
        (
            sum(1 for at in instants if 0 <= (at - first).total_seconds() < 1.0)
            for first in instants
        ),
        default=0,
    )


@pytest.mark.parametrize("strict_first", [True, False])
def test_from_the_moment_the_strict_one_has_joined_nobody_releases_more(
    rules: Any, strict_first: bool
) -> None:
    rules(r=LOOSE)
    CallQueue.objects.send_many([URL] * 2000, rule="r")
    strict, loose = Process("strict", r=STRICT), Process("loose", r=LOOSE)
    first, second = (strict, loose) if strict_first else (loose, strict)
    with at_work(worker, working(first)):
        wait_for(lambda: CallAttempt.objects.count() > (2 if strict_first else 45))
        with at_work(working(second)):
            since = registered(strict)
            wait_for(
                lambda: loose.membership.book and len(loose.membership.book.all_budgets()) == 2
            )
            wait_for(lambda: len(released_since(since)) >= 7)
    assert most_in_a_second(released_since(since)) <= 2


def test_they_come_and_go_and_nobody_ever_releases_more_than_those_that_are_there(
    rules: Any,
) -> None:
    """Strict ones come and go beside a loose one; while any is there, two a second."""
    rules(r=LOOSE)
    CallQueue.objects.send_many([URL] * 3000, rule="r")
    spans = []
    with at_work(worker, working(Process("loose", r=LOOSE))):
        for number in range(4):
            strict = Process(f"strict{number}", r=STRICT)
            with at_work(working(strict)):
                since = registered(strict)
                wait_for(lambda since=since: len(released_since(since)) >= 3)  # type: ignore[misc]
                spans.append((since, database.clock("default")))
            strict.leave()
            end = database.clock("default")
            wait_for(lambda end=end: len(released_since(end)) > 20)  # type: ignore[misc]
    for since, until in spans:
        within = CallAttempt.objects.filter(
            released_at__gt=since, released_at__lt=until, finished_at__isnull=False
        )
        assert most_in_a_second(sorted(within.values_list("finished_at", flat=True))) <= 2


def test_a_lowered_limit_holds_for_every_pass_once_it_is_set(rules: Any) -> None:
    rules(r=LOOSE)
    CallQueue.objects.send_many([URL] * 2000, rule="r")
    with at_work(worker, working(Process("one", r=LOOSE)), working(Process("two", r=LOOSE))):
        wait_for(lambda: CallAttempt.objects.count() > 60)
        control.change_limit("default", "r", "r#0", "2/s")
        since = database.clock("default")
        wait_for(lambda: len(released_since(since)) >= 5)
    assert most_in_a_second(released_since(since)) <= 2


def test_a_row_that_a_frozen_pass_holds_keeps_nobody_else_back(rules: Any) -> None:
    """The others go by the new settings at once; the frozen one's rule, once its row is free."""
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one writer at a time")
    both = {"a": LOOSE, "b": LOOSE}
    rules(**both)
    Process("old", **both).joins()
    CallQueue.objects.send_many([URL] * 10, rule="a")
    CallQueue.objects.send_many([URL] * 10, rule="b")
    inside, thaw = threading.Event(), threading.Event()

    def frozen(stop: threading.Event) -> None:
        with database.writing("default"):
            assert database.locked(RuleState.objects.filter(rule="a")).get()
            inside.set()
            thaw.wait(60)

    strict = Process("strict", a=STRICT, b=STRICT)
    with at_work(frozen):
        try:
            assert inside.wait(60)
            assert strict.goes() == {"b": 2}
        finally:
            thaw.set()
    assert strict.goes() == {"a": 2}


def test_what_a_slow_pass_of_a_rule_that_has_left_the_limit_charges_is_waited_for(
    rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit goes from one rule to another. A pass of the old rule is still to be committed when
    its opinion has lapsed: nobody else's pass has a row of its own in common with it.
    """
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one writer at a time")
    shared = Rule(limits=[SlidingWindow("2/h", name="account")])
    rules(a=shared, b=shared)
    CallQueue.objects.send_many([URL] * 5, rule="a")
    CallQueue.objects.send_many([URL] * 5, rule="b")
    before, after = Process("before", a=shared), Process("after", b=shared)
    before.joins()
    inside, thaw = threading.Event(), threading.Event()
    has_thawed: list[bool] = []
    real = release_pass.remember

    def remember(account: Any, *args: Any) -> None:
        real(account, *args)
        if account.rules == ("a",):
            inside.set()
            has_thawed.append(thaw.wait(15))

    monkeypatch.setattr(release_pass, "remember", remember)
    book = before.membership.book

    def slow(stop: threading.Event) -> None:
        release("default", ["a"], book)

    with at_work(slow):
        try:
            assert inside.wait(60)
            after.joins()
            before.leave()
            found = after.goes()
            assert not has_thawed, "nobody who changes the settings waits for it"
        finally:
            thaw.set()
    assert found == {}
    assert CallAttempt.objects.count() == 2
    assert after.goes() == {}


def test_who_is_frozen_while_he_states_his_opinion_keeps_nobody_else_back(rules: Any) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("no other server ends what a silent client has begun")
    rules(r=LOOSE)
    inside, thaw = threading.Event(), threading.Event()

    def frozen(stop: threading.Event) -> None:
        with suppress(DatabaseError), database.writing("default"):
            settings._locked("default")
            inside.set()
            has_thawed.append(thaw.wait(15))

    has_thawed: list[bool] = []
    with at_work(frozen):
        try:
            assert inside.wait(60)
            Process("other", r=STRICT).joins()
            assert not has_thawed
        finally:
            thaw.set()


@pytest.mark.usefixtures("rules")
def test_what_a_killed_dispenser_held_counts_until_it_has_been_silent(
    processes: Processes, configure: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure('CALLQUEUE = {"RULES": {"r": Rule(limits=[SlidingWindow("2/h")])}}')
    killed = processes.dispenser()
    wait_for(lambda: DispenserState.objects.exclude(digest="").exists())
    CallQueue.objects.send_many([URL] * 30, rule="r")
    wait_for(lambda: CallAttempt.objects.count() == 2)
    killed.kill()
    loose = Process("loose", r=Rule(limits=[SlidingWindow("9/h")]))
    assert (loose.goes(), loose.goes()) == ({}, {})
    monkeypatch.setattr(settings, "SILENCE", 0.0)
    assert loose.goes() == {"r": 7}
