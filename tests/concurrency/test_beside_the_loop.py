"""Nothing that a dispenser does besides releasing keeps the calls of another rule waiting."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from callqueue import (
    Rule,
    SlidingWindow,
    aside,
    broker,
    callbacks,
    database,
    events,
    states,
    tasks,
    transitions,
)
from callqueue.aside import LeftBehind
from callqueue.dispatch import chores
from callqueue.dispatch.chores import Chores
from callqueue.dispatch.dispenser import Dispenser
from callqueue.models import CallQueue, DispenserState
from callqueue.testing import travel
from tests.support.behaviour import send
from tests.support.verdicts import wait_until

Rules = Callable[..., None]
PATIENCE = 60  # seconds that anything may take on a busy machine
FAST = 30  # calls of the other rule, at 50 a second
TABLE = Chores("default", lambda: None).table
DEEDS = ["raises", "exits", "is refused", "hangs"]
# One guard is around them all: each is struck once, and one aside and one in the loop in every way.
# What hangs in the loop itself has only statements to hang in.
IN_LOOP, ASIDE = (next(one.name for one in TABLE if one.aside is aside) for aside in (False, True))
STRIKES = [(one.name, "raises") for one in TABLE]
STRIKES += [(IN_LOOP, "is refused"), *((ASIDE, how) for how in DEEDS[1:])]


class Strike:
    """What is done in the place of something, until `over`."""

    def __init__(self, how: str) -> None:
        self.how, self.came, self.over = how, threading.Event(), threading.Event()
        self.times = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.times += 1
        self.came.set()
        if self.how == "raises":
            raise ValueError("as asked")
        if self.how == "exits":
            raise SystemExit(1)
        if self.how == "is refused":
            database.rows("default", "SELECT nothing FROM callqueue_not_there")
        assert self.over.wait(PATIENCE)


class Released:
    """Takes messages; what goes to the queue "stuck" is `stuck`'s."""

    def __init__(self, stuck: Callable[[], None] = lambda: None) -> None:
        self.stuck, self.count = stuck, 0
        self.all = threading.Event()

    def __call__(self, using: str, messages: Any) -> None:
        if any(queue == "stuck" for queue, _ in messages):
            self.stuck()
            return
        self.count += sum(len(ids) for _, ids in messages)
        if self.count >= FAST:
            self.all.set()


@contextmanager
def running(publish: Released, strike: Strike, name: str = "") -> Iterator[Dispenser]:
    """A dispenser in a thread, one chore of which may be struck. It ends with the block."""
    dispenser, stop = Dispenser(publish=publish), threading.Event()
    for chore in dispenser.chores.table:
        if chore.name == name:
            chore.do = strike

    def run() -> None:
        dispenser.run(stop=stop)
        database.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield dispenser
    finally:
        strike.over.set()
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def all_go(released: Released, strike: Strike) -> None:
    """Once it is struck, the other rule's calls go, though the strike is not over."""
    assert strike.came.wait(PATIENCE)
    for _ in range(FAST):
        send("fast")
    assert released.all.wait(PATIENCE), released.count
    assert not strike.over.is_set()


@pytest.fixture
def fast(rules: Rules) -> None:
    rules(fast=Rule(limits=[SlidingWindow("50/s")]), slow=Rule(queues="stuck"), shy=Rule())


@pytest.mark.parametrize(("name", "how"), STRIKES)
def test_a_chore_that_is_struck_keeps_no_call_waiting_and_is_told_of(
    fast: None,
    name: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if how == "hangs":
        monkeypatch.setattr(chores, "TELL", 0.2)
    released, strike = Released(), Strike(how)
    with running(released, strike, name), caplog.at_level("ERROR", logger="callqueue"):
        all_go(released, strike)
        wait_until(lambda: any(f"chore_failed chore={name}" in m for m in caplog.messages))
    assert not any("database_away" in message for message in caplog.messages)


def test_a_chore_that_hangs_is_not_begun_again_and_keeps_no_other_back(fast: None) -> None:
    hangs = Strike("hangs")
    with running(Released(), hangs) as dispenser:
        begun: dict[str, threading.Event] = {}
        for chore in dispenser.chores.table:
            if chore.name == "history":
                chore.do = hangs
            elif chore.aside:
                begun[chore.name] = threading.Event()
                chore.every, chore.due_at, chore.do = 0.0, 0.0, begun[chore.name].set
        assert hangs.came.wait(PATIENCE)
        for event in begun.values():
            event.clear()
        assert all(event.wait(PATIENCE) for event in begun.values()), begun
        assert hangs.times == 1


@pytest.fixture
def a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It announces, in a thread of its own."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        while (args := inbox.get()) is not None:
            tasks.announce(*args)
        database.close_all()

    monkeypatch.setattr(broker, "send_beside", lambda name, args, queue="": inbox.put(args))
    thread = threading.Thread(target=work)
    thread.start()
    yield
    inbox.put(None)
    thread.join(PATIENCE)


@pytest.mark.parametrize("how", DEEDS)
@pytest.mark.parametrize("what", ["a receiver", "a callback", "the broker"])
def test_what_the_project_does_at_an_end_keeps_no_call_waiting(
    fast: None,
    a_worker: None,
    announced_here: Any,
    what: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strike = Strike(how)
    if what == "a receiver":
        monkeypatch.setattr(events.call_finished, "receivers", [])
        events.call_finished.connect(strike)
    elif what == "a callback":
        monkeypatch.setattr(broker, "send_by_name", strike)
    else:
        monkeypatch.setattr(broker, "send_beside", announced_here)
        monkeypatch.setattr(broker, "send", strike)
    late = [send("slow", callback="shop.told") for _ in range(10)]
    CallQueue.objects.update(expires_at_dt=timezone.now() - timedelta(seconds=60))
    released = Released()
    ended = CallQueue.objects.filter(pk__in=[call.pk for call in late])
    owed = ended.filter(callback_pending=True)
    stays_owed = what == "the broker" or (what == "a callback" and how != "hangs")
    with running(released, strike):
        all_go(released, strike)
        strike.over.set()
        if not stays_owed:
            wait_until(lambda: not owed.exists())
    assert set(ended.values_list("status", flat=True)) == {states.EXPIRED}
    assert owed.exists() == stays_owed


def test_a_receiver_that_hangs_keeps_no_worker_and_no_callback(
    owed: list[CallQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    strike, sent = Strike("hangs"), list[int]()
    monkeypatch.setattr(callbacks, "SENDING", 0.1)
    monkeypatch.setattr(broker, "send_by_name", lambda app, name, args: sent.append(args[0]))
    monkeypatch.setattr(events.call_finished, "receivers", [])
    events.call_finished.connect(strike)
    assert tasks.announce([call.pk for call in owed]) == 3
    assert sent == [call.pk for call in owed]
    strike.over.set()
    wait_until(lambda: not any(one.is_under_way for one in aside._left))


def test_messages_go_one_after_the_other_and_the_first_are_dropped_of_too_many(
    announced_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike, sent = Strike("hangs"), list[Any]()

    def send_it(task: Any, args: Any, **_: Any) -> None:
        strike()
        sent.append(args[0])

    monkeypatch.setattr(broker, "_unsent", deque(maxlen=3))
    monkeypatch.setattr(broker, "send", send_it)
    announced_here(broker.ANNOUNCE, (0,))
    assert strike.came.wait(PATIENCE)
    for number in range(1, 6):
        announced_here(broker.ANNOUNCE, (number,))
    assert sum(one.name == "callqueue-messages" for one in threading.enumerate()) == 1
    strike.over.set()
    wait_until(lambda: len(sent) == 4)
    assert sent == [0, 3, 4, 5]


@pytest.mark.parametrize("how", ["raises", "is refused", "hangs"])
def test_a_queue_that_takes_no_message_keeps_no_other_waiting(
    fast: None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was to go there waits again."""
    monkeypatch.setattr(chores, "HEARTBEAT", 0.1)
    strike = Strike(how)
    released = Released(strike)
    call = send("slow")
    with running(released, strike) as dispenser:
        all_go(released, strike)
        alive = DispenserState.objects.filter(pk=dispenser.name)
        seen = alive.get().seen_at
        dispenser.chores._heartbeat.every = 0.1
        wait_until(lambda: alive.filter(seen_at__gt=seen).exists())
        if how != "hangs":
            wait_until(lambda: call.attempts.filter(outcome=states.VOIDED).exists())


# --- Messages and callbacks


def test_a_message_is_given_up_after_its_patience_whatever_the_transport_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strike = Strike("hangs")
    monkeypatch.setattr(broker, "PATIENCE", 0.2)
    monkeypatch.setattr(tasks.make_api_call, "apply_async", strike)
    with pytest.raises(LeftBehind):
        broker.send(tasks.make_api_call, ([1],), queue="q")
    strike.over.set()


def test_no_more_threads_are_left_behind_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    strike = Strike("hangs")
    monkeypatch.setattr(aside, "MOST_LEFT", 2)
    before = threading.active_count()
    for _ in range(5):
        with suppress(LeftBehind):
            aside.within(0.01, "a test", strike)
    assert threading.active_count() <= before + 2
    strike.over.set()
    wait_until(lambda: not any(one.is_under_way for one in aside._left))
    assert aside.within(PATIENCE, "a test", lambda: 7) == 7


@pytest.fixture
def owed(rules: Rules) -> list[CallQueue]:
    """Calls that ended long ago, whose callbacks are owed: of three, the first two to one task."""
    rules(r=Rule())
    calls = [send("r", callback=task) for task in ("shop.bad", "shop.bad", "shop.good")]
    long_ago = timezone.now() - timedelta(hours=1)
    CallQueue.objects.update(
        status=states.UNKNOWN, ready=False, callback_pending=True, finished_at_dt=long_ago
    )
    return calls


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of which a receiver has heard."""
    heard: list[int] = []
    monkeypatch.setattr(events.call_finished, "receivers", [])
    events.call_finished.connect(lambda call_id, **_: heard.append(call_id), weak=False)
    return heard


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls whose ends a worker was asked to announce."""
    asked: list[int] = []
    monkeypatch.setattr(broker, "send_beside", lambda name, args, **_: asked.extend(args[0]))
    return asked


def a_while_later(calls: Any) -> None:
    calls.update(callback_at=timezone.now() - timedelta(seconds=1))


def test_a_callback_that_always_fails_keeps_none_of_the_others_back(
    owed: list[CallQueue], heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its signal go again."""
    tried: list[int] = []

    def refuse_bad(app: Any, name: str, args: Any) -> None:
        assert not database.in_transaction("default"), "calls are locked meanwhile"
        tried.append(args[0])
        if name == "shop.bad":
            raise LookupError(name)

    monkeypatch.setattr(broker, "send_by_name", refuse_bad)
    first, second, good = (call.pk for call in owed)
    assert [tasks.announce([first, second, good]) for _ in range(3)] == [1, 0, 0]
    assert tried == [first, good], "and is not tried again at once"
    pending = CallQueue.objects.filter(callback_pending=True)
    assert set(pending.values_list("pk", flat=True)) == {first, second}
    a_while_later(pending)
    monkeypatch.setattr(broker, "send_by_name", lambda app, name, args: None)
    assert tasks.announce([first, second, good]) == 2
    assert heard.count(first) == heard.count(good) == 1


def test_a_callback_that_takes_its_time_keeps_none_of_the_others_back(
    owed: list[CallQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there was no time for goes in the next round, before whatever took it all."""
    now, tried = [0.0], list[int]()

    def take_long(app: Any, name: str, args: Any) -> None:
        tried.append(args[0])
        if name == "shop.bad":
            now[0] += callbacks.SENDING + 1
            raise TimeoutError

    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(broker, "send_by_name", take_long)
    first, second, good = ids = [call.pk for call in owed]
    assert tasks.announce(ids) == 0
    tried_before = CallQueue.objects.filter(callback_pending=True, callback_at__isnull=False)
    a_while_later(tried_before)
    assert tasks.announce(ids) == 1
    assert tried == [first, good, first]
    assert set(tried_before.values_list("pk", flat=True)) == {first, second}


def test_what_a_call_owes_anew_while_its_callback_is_sent_is_sent_too(
    owed: list[CallQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CallQueue.objects.get(pk=owed[2].pk)
    told: list[str] = []

    def settle_meanwhile(app: Any, name: str, args: Any) -> None:
        told.append(args[1])
        if args[1] == "unknown":
            monkeypatch.setattr(
                broker, "send_by_name", lambda app, name, args: told.append(args[1])
            )
            assert transitions.end_unknown("default", call, states.DONE, "")

    monkeypatch.setattr(broker, "send_by_name", settle_meanwhile)
    tasks.announce([call.pk])
    assert told == ["unknown", "done"]
    call.refresh_from_db()
    assert not call.callback_pending


def test_ends_that_no_worker_announces_keep_none_of_the_others_back(
    owed: list[CallQueue], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a look asks for have a queue without a worker: the next look asks for the rest."""
    monkeypatch.setattr(callbacks, "MOST_OWED", 2)
    [chore] = [one for one in Chores("default", lambda: None).table if one.name == "callbacks"]
    for _ in range(3):
        chore.do()
    assert asked == [call.pk for call in owed]


def test_ends_whose_queue_has_no_worker_are_asked_for_less_and_less_often(
    owed: list[CallQueue], asked: list[int]
) -> None:
    """A day of it is some 150 messages, not one every ten seconds; and none is forgotten."""
    CallQueue.objects.exclude(pk=owed[0].pk).update(callback_pending=False)
    CallQueue.objects.update(finished_at_dt=database.clock("default"))
    seen = []
    for seconds in (4, 12, 18, 40, 60, 100, 160, 240, 900, 1400, 1600):
        with travel(seconds=seconds):
            callbacks.ask_for_owed_ends("default")
        seen.append(len(asked))
    assert seen == [0, 1, 1, 2, 2, 3, 3, 4, 5, 5, 6]


def test_what_there_was_no_time_to_announce_is_asked_for_again_as_soon_as_it_may_be(
    owed: list[CallQueue], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue has a worker, so it does not wait for as long as it has been owed."""
    now = [0.0]

    def take_long(app: Any, name: str, args: Any) -> None:
        now[0] += callbacks.SENDING + 1

    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(broker, "send_by_name", take_long)
    callbacks.ask_for_owed_ends("default")
    ids = [call.pk for call in owed]
    assert asked == ids
    assert tasks.announce(ids) == 1
    with travel(seconds=12):
        callbacks.ask_for_owed_ends("default")
    assert asked == [*ids, *ids[1:]]


def test_a_clock_that_is_set_back_forgets_no_end(
    owed: list[CallQueue], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one the claim, of one the end, and of all when they may be asked for are a day ahead."""
    monkeypatch.setattr(broker, "send_by_name", lambda app, name, args: None)
    ids = [call.pk for call in owed]
    with travel(days=1):
        callbacks.ask_for_owed_ends("default")
        ahead = database.clock("default")
    CallQueue.objects.filter(pk=ids[1]).update(callback_at=ahead + callbacks.CLAIMED)
    CallQueue.objects.filter(pk=ids[2]).update(finished_at_dt=ahead)
    for _ in range(2):
        callbacks.ask_for_owed_ends("default")
    assert asked == [*ids, *ids], "and no more often than before"
    assert tasks.announce(ids) == 3


def test_a_sender_that_dies_leaves_its_callbacks_to_others(
    owed: list[CallQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [call.pk for call in owed]

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "_send_owed", die)
        with pytest.raises(KeyboardInterrupt):
            tasks.announce(ids)
    monkeypatch.setattr(broker, "send_by_name", lambda *_: None)
    assert tasks.announce(ids) == 0, "while the claim lasts"
    a_while_later(CallQueue.objects)
    callbacks.ask_for_owed_ends("default")
    assert not CallQueue.objects.filter(callback_pending=True).exists()
