"""Everybody at the same calls at once, each with a connection of his own: hosts, operators,
dispensers, workers, chores.

Whatever reaches a host or an operator is a failure, a deadlock above all. In: seconds. Out: how
often each did its work; and then nothing is left that only one of two rows says.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import OperationalError, connections, transaction

from callqueue import Retry, Rule, SlidingWindow, states, transitions
from callqueue.control import bulk
from callqueue.dispatch.release_pass import release
from callqueue.execution import executor
from callqueue.maintenance import cleanup, recovery
from callqueue.models import BelatedEnding, CallAttempt, CallQueue
from tests.support.behaviour import Vendor

SETTINGS = {
    "RULES": {
        "r": Rule(
            limits=[SlidingWindow("2000/s")], retry=Retry(max_attempts=3, base=0.01, jitter=False)
        ),
        "keyed": Rule(limits=[SlidingWindow("500/s", per="key")], on_lost="retry"),
    },
    "LEASE": {"RELEASE": 0.5, "GRACE": 30},
}
KEYS = [f"order-{number}" for number in range(30)]
DATA = {"method": "get", "params": {"url": "http://vendor.example/"}}
WHOLE = 300  # calls beside which no more are sent for a while
PATIENCE = 60  # seconds that one turn of anybody may take on a busy machine


class Hammer:
    """Run it, then `judge`."""

    def __init__(self, vendor: Vendor, seed: int = 1) -> None:
        self.vendor, self.random = vendor, random.Random(seed)
        self.turns: Counter[str] = Counter()
        self.errors: list[tuple[str, BaseException]] = []
        self._messages: queue.Queue[list[int]] = queue.Queue()
        self._stop = threading.Event()
        vendor.answers["/"] = lambda: self.random.choice([200, 200, 200, 500, 429])

    def run(self, seconds: float) -> None:
        """Let everybody work for so long."""
        everybody = [
            *([self.send_many] * 2),
            *([self.cancel, self.requeue, self.select_and_cancel] * 2),
            *([self.dispense, self.work] * 2),
            *[
                self.bulk_cancel,
                self.bulk_requeue,
                self.clean,
                self.recover,
                self.hold,
                self.send_one,
            ],
        ]
        threads = [
            threading.Thread(target=self._again_and_again, args=(turn,), daemon=True)
            for turn in everybody
        ]
        for thread in threads:
            thread.start()
        self._stop.wait(seconds)
        self._stop.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), (
                "somebody hangs: a deadlock that the database does not see"
            )

    def judge(self) -> None:
        """Nobody failed, everybody had a turn, and calls and attempts agree once the last leases
        are over.
        """
        assert not self.errors, f"{len(self.errors)} failed: {self.errors[0]}"
        names = {
            "send_many",
            "cancel",
            "requeue",
            "dispense",
            "work",
            "clean",
            "recover",
            "bulk_cancel",
            "bulk_requeue",
        }
        assert names <= set(self.turns), f"no turn: {names - set(self.turns)}"
        time.sleep(2 * SETTINGS["LEASE"]["RELEASE"])  # type: ignore[index]
        recovery.recover("default")
        assert not BelatedEnding.objects.exists()
        open_of = Counter(CallAttempt.objects.open().values_list("call_id", flat=True))
        dispatched = set(CallQueue.objects.dispatched().values_list("pk", flat=True))
        assert set(open_of) == dispatched == set()
        active = Counter(
            CallQueue.objects.filter(status__in=states.UNFINISHED)
            .exclude(unique_key=None)
            .values_list("unique_key")
        )
        assert not active or max(active.values()) == 1

    def _again_and_again(self, turn: Callable[[], Any]) -> None:
        try:
            while not self._stop.is_set():
                self.turns[self._one(turn)] += 1
                time.sleep(0.002)
        except BaseException as error:
            self.errors.append((turn.__name__, error))
            self._stop.set()
        finally:
            connections.close_all()

    def _one(self, turn: Callable[[], Any]) -> str:
        """What was done. InnoDB locks gaps in a unique index: its victim comes again, be it a
        process of ours or a transaction of a host's own. What is a transaction by itself never
        raises that.
        """
        try:
            turn()
        except OperationalError as error:
            if turn.__name__ not in (
                "dispense",
                "work",
                "recover",
                "select_and_cancel",
            ) or error.args[:1] != (1213,):
                raise
            return "deadlock"
        return turn.__name__

    def some(self, most: int = 20) -> Any:
        """A few calls, whatever they are."""
        pks = list(CallQueue.objects.values_list("pk", flat=True))
        return CallQueue.objects.filter(pk__in=self.random.sample(pks, min(len(pks), most)))

    # --- Hosts and operators

    def send_many(self) -> None:
        if CallQueue.objects.count() > WHOLE:
            return
        keys = self.random.sample(KEYS, 12)
        items = [
            {
                "call_data": DATA,
                "unique_key": key,
                "rule": self.random.choice(["r", "keyed"]),
                "key": key,
            }
            for key in keys
        ]
        calls = CallQueue.objects.send_many([*items, DATA], rule="r", batch_size=5)
        assert [call.unique_key for call in calls] == [*keys, None]

    def send_one(self) -> None:
        CallQueue.objects.send(DATA, rule="r", unique_key=self.random.choice(KEYS))

    def cancel(self) -> None:
        self.some().order_by("?").cancel()

    def requeue(self) -> None:
        self.some().order_by("?").requeue(again=True)

    def select_and_cancel(self) -> None:
        with transaction.atomic():
            call = self.some(1).select_for_update().first()
            if call is not None:
                CallQueue.objects.filter(pk=call.pk).cancel()

    def hold(self) -> None:
        with transaction.atomic():
            list(self.some(5).select_for_update().order_by("pk"))
            time.sleep(0.1)
        time.sleep(0.1)

    def bulk_cancel(self) -> None:
        bulk.cancel(
            "default",
            bulk.Pick(
                (states.NEW, states.ERROR, states.DISPATCHED),
                rule=self.random.choice(["r", "keyed"]),
            ),
        )
        time.sleep(0.1)

    def bulk_requeue(self) -> None:
        bulk.requeue("default", bulk.Pick(states.REQUEUABLE))
        time.sleep(0.1)

    def clean(self) -> None:
        cleanup.clean("default", older_than=timedelta(seconds=0.2), batch_size=7)

    # --- Dispensers, workers, chores

    def dispense(self) -> None:
        for rule in ("r", "keyed"):
            ids = [one.attempt_id for one in release("default", [rule], batch=20).released]
            lost = self.random.random()
            if ids and lost < 0.2:
                transitions.undo("default", ids)
            elif ids and lost < 0.9:
                self._messages.put(ids)
                self._messages.put(ids[:3])  # delivered twice

    def work(self) -> None:
        try:
            executor.execute("default", self._messages.get(timeout=0.05))
        except queue.Empty:
            return

    def recover(self) -> None:
        recovery.recover("default")
