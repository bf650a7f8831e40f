"""An idle dispenser is woken by a commit, not by its next look; busy senders ring no bell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connection, transaction
from django.utils import timezone

from callqueue import Rule, database
from callqueue.dispatch.dispenser import Dispenser, Listener
from callqueue.models import CallQueue

pytestmark = pytest.mark.django_db(transaction=True)
CALL = {"method": "post", "params": {"url": "http://vendor.example/"}}


@pytest.fixture(autouse=True)
def on_postgresql() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL wakes whoever waits")


def in_thread(work: Callable[[], Any]) -> Any:
    """Do something on a connection of its own; what it returned."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert found, "it did not end"
    return found[0]


def send() -> Any:
    return CallQueue.objects.send(CALL)


@pytest.fixture
def bell() -> Any:
    """A bell that is armed: its first wait looks again at once."""
    connection.ensure_connection()
    bell = Listener("default")
    assert bell.wait(threading.Event(), 5)
    yield bell
    bell.close()


@pytest.mark.parametrize("comes_with_an_answer", [False, True])
def test_a_send_ends_the_wait(bell: Any, comes_with_an_answer: bool) -> None:
    """What came with the answer to a statement leaves nothing to be read: it was slept over."""
    in_thread(send)
    if comes_with_an_answer:
        database.clock("default")
    assert bell.wait(threading.Event(), 20) == {"default"}


def test_senders_name_a_few_rules_and_leave_many_to_a_look(bell: Any, settings: Any) -> None:
    names = [f"r{i}" for i in range(database.TOLD + 1)]
    settings.CALLQUEUE = {"RULES": {name: Rule() for name in names}}
    in_thread(
        lambda: CallQueue.objects.send_many(
            [{"call_data": CALL, "rule": name} for name in names[1:]]
        )
    )
    assert bell.wait(threading.Event(), 20) == set(names[1:])
    in_thread(
        lambda: CallQueue.objects.send_many([{"call_data": CALL, "rule": name} for name in names])
    )
    assert bell.wait(threading.Event(), 20) == {""}


def test_what_is_due_later_or_rolled_back_does_not_ring_nor_does_nothing(bell: Any) -> None:
    def send_in_vain() -> bool:
        with transaction.atomic():
            send()
            transaction.set_rollback(True)
        return True

    assert not bell.wait(threading.Event(), 0.05)
    in_thread(lambda: CallQueue.objects.send(CALL, not_before=timezone.now() + timedelta(hours=1)))
    in_thread(send_in_vain)
    assert not bell.wait(threading.Event(), 0.05)


def test_a_busy_dispenser_is_not_rung_for(bell: Any) -> None:
    bell.wait(threading.Event(), 0)  # it has work: it does not wait
    in_thread(send)
    assert not database.wait_for_word("default", 0.05)
    assert bell.wait(threading.Event(), 5) == {""}, "it is idle again, and looks once more"
    in_thread(send)
    assert bell.wait(threading.Event(), 20) == {"default"}


def test_while_a_sender_has_a_transaction_the_bell_is_not_armed_and_the_wait_an_ordinary_one() -> (
    None
):
    connection.ensure_connection()
    bell, sent, may_commit = Listener("default"), threading.Event(), threading.Event()

    def send_slowly() -> None:
        with transaction.atomic():
            send()
            sent.set()
            may_commit.wait(20)
        connection.close()

    thread = threading.Thread(target=send_slowly)
    thread.start()
    assert sent.wait(20)
    assert not bell.wait(threading.Event(), 0.02)
    may_commit.set()
    thread.join(20)
    assert bell.wait(threading.Event(), 0.02)  # armed now: look again
    bell.close()


def test_only_one_dispenser_is_woken(bell: Any) -> None:
    """Of the others, not even the server's process is."""

    def other() -> tuple[set[str], list[Any]]:
        connection.ensure_connection()
        waited = Listener("default").wait(threading.Event(), 0.02)
        return waited, database.rows("default", "SELECT pg_listening_channels()")

    assert in_thread(other) == (set(), [])


def test_a_dispenser_that_looks_rarely_releases_at_once(settings: Any) -> None:
    settings.CALLQUEUE = {"DISPENSER": {"POLL": 30.0}}
    stop, released = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=lambda: (
            Dispenser(publish=lambda *_: released.set() or True).run(stop=stop),
            connection.close(),
        )
    )
    thread.start()
    while not _is_armed():
        stop.wait(0.01)
    send()
    woken = released.wait(10)
    stop.set()
    thread.join(20)
    assert woken


def _is_armed() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
            "WHERE datname = current_database() AND locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted"
        )
        return bool(cursor.fetchone()[0])


def test_a_bell_that_was_closed_leaves_nothing_behind(bell: Any) -> None:
    bell.close()
    assert not _is_armed()
    assert not database.rows("default", "SELECT pg_listening_channels()")
    in_thread(send)
    assert not database.wait_for_word("default", 0.05)


def test_a_connection_that_breaks_while_it_is_waited_on_is_a_database_that_is_away() -> None:
    """The driver's own error is none that a dispenser knows: it would end."""

    def wait_on_a_broken_one() -> BaseException | None:
        connection.ensure_connection()
        raw = connection.connection
        raw.close()
        try:
            database.wait_for_word("default", 5)
        except (DatabaseError, InterfaceError) as error:
            return error
        return None

    assert isinstance(in_thread(wait_on_a_broken_one), DatabaseError | InterfaceError)
