"""An idle dispenser is woken by a commit, not by its next look; busy senders ring no bell."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connection, transaction
from django.utils import timezone

from callqueue import Rule, database
from callqueue.dispatch.dispenser import Dispenser, Listener
from callqueue.models import CallQueue
from tests.support.locking import beside_a_frozen, together

pytestmark = pytest.mark.django_db(transaction=True)
CALL = {"method": "post", "params": {"url": "http://vendor.example/"}}


@pytest.fixture(autouse=True)
def on_postgresql() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL wakes whoever waits")


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
    together(send)
    if comes_with_an_answer:
        database.clock("default")
    assert bell.wait(threading.Event(), 20) == {"default"}


def test_senders_name_a_few_rules_and_leave_many_to_a_look(bell: Any, settings: Any) -> None:
    names = [f"r{i}" for i in range(database.TOLD + 1)]
    settings.CALLQUEUE = {"RULES": {name: Rule() for name in names}}
    for some, told in ((names[1:], set(names[1:])), (names, {""})):
        calls = [{"call_data": CALL, "rule": name} for name in some]
        together(partial(CallQueue.objects.send_many, calls))
        assert bell.wait(threading.Event(), 20) == told


def test_what_is_due_later_or_rolled_back_does_not_ring_nor_does_nothing(bell: Any) -> None:
    def send_in_vain() -> None:
        with transaction.atomic():
            send()
            transaction.set_rollback(True)

    assert not bell.wait(threading.Event(), 0.05)
    together(lambda: CallQueue.objects.send(CALL, not_before=timezone.now() + timedelta(hours=1)))
    together(send_in_vain)
    assert not bell.wait(threading.Event(), 0.05)


def test_a_busy_dispenser_is_not_rung_for(bell: Any) -> None:
    bell.wait(threading.Event(), 0)  # it has work: it does not wait
    together(send)
    assert not database.wait_for_notification("default", 0.05)
    assert bell.wait(threading.Event(), 5) == {""}, "it is idle again, and looks once more"
    together(send)
    assert bell.wait(threading.Event(), 20) == {"default"}


def test_while_a_sender_has_a_transaction_the_bell_is_not_armed_and_the_wait_an_ordinary_one() -> (
    None
):
    def send_slowly(freeze: Any) -> None:
        with transaction.atomic():
            send()
            freeze()

    connection.ensure_connection()
    bell = Listener("default")
    with beside_a_frozen(send_slowly):
        assert not bell.wait(threading.Event(), 0.02)
    assert bell.wait(threading.Event(), 0.02)  # armed now: look again
    bell.close()


def test_only_one_dispenser_is_woken(bell: Any) -> None:
    """Of the others, not even the server's process is."""

    def other() -> tuple[set[str], list[Any]]:
        connection.ensure_connection()
        waited = Listener("default").wait(threading.Event(), 0.02)
        return waited, database.rows("default", "SELECT pg_listening_channels()")

    assert together(other) == [(set(), [])]


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


def test_after_two_words_for_nothing_senders_are_let_be_for_a_while(bell: Any) -> None:
    def hear() -> None:
        together(send)
        assert bell.wait(threading.Event(), 20)
        bell.wait(threading.Event(), 0.1)

    hear()
    bell.note_useful_wake()
    hear()
    assert _is_armed()
    hear()
    assert not _is_armed()


def test_a_bell_that_was_closed_leaves_nothing_behind(bell: Any) -> None:
    bell.close()
    assert not _is_armed()
    assert not database.rows("default", "SELECT pg_listening_channels()")
    together(send)
    assert not database.wait_for_notification("default", 0.05)


def test_a_connection_that_breaks_while_it_is_waited_on_is_a_database_that_is_away() -> None:
    """The driver's own error is none that a dispenser knows: it would end."""

    def wait_on_a_broken_one() -> None:
        connection.ensure_connection()
        connection.connection.close()
        with pytest.raises((DatabaseError, InterfaceError)):
            database.wait_for_notification("default", 5)

    together(wait_on_a_broken_one)
