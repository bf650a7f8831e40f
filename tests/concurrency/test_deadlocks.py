"""Everybody at the same calls at once: nobody fails, and what two rows say agrees."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from callqueue import Retry, Rule, SlidingWindow, states, transitions
from callqueue.control import bulk
from callqueue.dispatch.release_pass import ensure_state_rows, release
from callqueue.execution import executor
from callqueue.maintenance import cleanup, recovery
from callqueue.models import BelatedEnding, CallAttempt, CallQueue
from tests.support.behaviour import Vendor
from tests.support.length import examples

PATIENT = Retry(max_attempts=3, base=0.01, jitter=False)
SETTINGS = {
    "RULES": {
        "r": Rule(limits=[SlidingWindow("2000/s")], retry=PATIENT),
        "keyed": Rule(limits=[SlidingWindow("500/s", per="key")], on_lost="retry"),
    },
    "LEASE": {"RELEASE": 0.5, "GRACE": 30},
}
KEYS = [f"order-{number}" for number in range(30)]
DATA = {"method": "get", "params": {"url": "http://vendor.example/"}}
WHOLE = 300  # calls beside which no more are sent for a while
PATIENCE = 60  # seconds that one turn of anybody may take on a busy machine
# InnoDB locks gaps in a unique index: its victim comes again, be it a process of ours or a
# transaction of a host's own. What is a transaction by itself never raises that.
COME_AGAIN = {"dispense", "work", "recover", "select_and_cancel"}


class Hammer:
    """Run it, then `judge`."""

    def __init__(self, vendor: Vendor, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.turns: Counter[str] = Counter()
        self.errors: list[tuple[str, BaseException]] = []
        self._messages: queue.Queue[list[int]] = queue.Queue()
        self._stop = threading.Event()
        vendor.answers["/"] = lambda: self.random.choice([200, 200, 200, 500, 429])
        calls = CallQueue.objects

        old = timedelta(seconds=0.2)
        # everybody, by how many there are, what one turn is, and for how long he rests
        self.everybody: dict[str, tuple[int, Callable[[], Any], float]] = {
            "send_many": (2, self.send_many, 0.0),
            "send_one": (
                1,
                lambda: calls.send(DATA, rule="r", unique_key=self.random.choice(KEYS)),
                0.0,
            ),
            "cancel": (2, lambda: self.some().order_by("?").cancel(), 0.0),
            "requeue": (2, lambda: self.some().order_by("?").requeue(again=True), 0.0),
            "select_and_cancel": (2, self.select_and_cancel, 0.0),
            "hold": (1, self.hold, 0.1),
            "bulk_cancel": (1, lambda: bulk.cancel("default", self.picked()), 0.1),
            "bulk_requeue": (1, lambda: bulk.requeue("default", bulk.Pick(states.REQUEUABLE)), 0.1),
            "clean": (1, lambda: cleanup.clean("default", older_than=old, batch_size=7), 0.0),
            "dispense": (2, self.dispense, 0.0),
            "work": (2, self.work, 0.0),
            "recover": (1, lambda: recovery.recover("default"), 0.0),
        }

    def run(self, seconds: float) -> None:
        """Let everybody work for so long."""
        threads = [
            threading.Thread(target=self._again_and_again, args=(name,), daemon=True)
            for name, (count, *_) in self.everybody.items()
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        self._stop.wait(seconds)
        self._stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        hangs = any(thread.is_alive() for thread in threads)
        assert not hangs, "somebody hangs: a deadlock that the database does not see"

    def judge(self) -> None:
        """Nobody failed, all had a turn, and calls and attempts agree after the last leases."""
        assert not self.errors, f"{len(self.errors)} failed: {self.errors[0]}"
        missing = self.everybody.keys() - set(self.turns) - {"hold", "select_and_cancel"}
        assert not missing, f"no turn: {missing}"
        time.sleep(2 * SETTINGS["LEASE"]["RELEASE"])  # type: ignore[index]
        recovery.recover("default")
        assert not BelatedEnding.objects.exists()
        assert not CallAttempt.objects.open().exists()
        assert not CallQueue.objects.dispatched().exists()
        unfinished = CallQueue.objects.filter(status__in=states.UNFINISHED)
        active = Counter(unfinished.exclude(unique_key=None).values_list("unique_key"))
        assert not active or max(active.values()) == 1

    def _again_and_again(self, name: str) -> None:
        _, turn, pause = self.everybody[name]
        try:
            while not self._stop.is_set():
                try:
                    turn()
                    self.turns[name] += 1
                except OperationalError as error:
                    if name not in COME_AGAIN or error.args[:1] != (1213,):
                        raise
                time.sleep(pause + 0.002)
        except BaseException as error:
            self.errors.append((name, error))
            self._stop.set()
        finally:
            connections.close_all()

    def some(self, most: int = 20) -> Any:
        """A few calls, whatever they are."""
        pks = list(CallQueue.objects.values_list("pk", flat=True))
        return CallQueue.objects.filter(pk__in=self.random.sample(pks, min(len(pks), most)))

    def send_many(self) -> None:
        if CallQueue.objects.count() > WHOLE:
            return
        keys = self.random.sample(KEYS, 12)
        rules = [self.random.choice(["r", "keyed"]) for _ in keys]
        items = [
            {"call_data": DATA, "unique_key": key, "rule": rule, "key": key}
            for key, rule in zip(keys, rules, strict=True)
        ]
        calls = CallQueue.objects.send_many([*items, DATA], rule="r", batch_size=5)
        assert [call.unique_key for call in calls] == [*keys, None]

    def select_and_cancel(self) -> None:
        with transaction.atomic():
            call = self.some(1).select_for_update().first()
            if call is not None:
                CallQueue.objects.filter(pk=call.pk).cancel()

    def picked(self) -> bulk.Pick:
        unfinished = (states.NEW, states.ERROR, states.DISPATCHED)
        return bulk.Pick(unfinished, rule=self.random.choice(["r", "keyed"]))

    def hold(self) -> None:
        with transaction.atomic():
            list(self.some(5).select_for_update().order_by("pk"))
            time.sleep(0.1)

    def dispense(self) -> None:
        for rule in ("r", "keyed"):
            ids = [one.attempt_id for one in release("default", [rule], batch=20).released]
            lost = self.random.random()
            if ids and lost < 0.2:
                transitions.void_and_log("default", ids)
            elif ids and lost < 0.9:
                self._messages.put(ids)
                self._messages.put(ids[:3])  # delivered twice

    def work(self) -> None:
        try:
            executor.execute("default", self._messages.get(timeout=0.05))
        except queue.Empty:
            return


@pytest.mark.usefixtures("transactional_db", "row_locks")
def test_nobody_is_the_victim_of_a_deadlock(
    settings: Any, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CALLQUEUE_EXAMPLES=300 is five minutes."""
    settings.CALLQUEUE = SETTINGS
    ensure_state_rows("default", list(SETTINGS["RULES"]))  # type: ignore[call-overload]
    monkeypatch.setattr(executor, "LOCKED", (0.0,))
    everybody = Hammer(remote)
    everybody.run(examples(3, 300))
    everybody.judge()
