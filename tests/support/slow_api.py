"""A worker without a network, and an API that takes its time: any number of calls in flight, in this
process.

In: a dispenser's messages. Out: when each call was sent, which is when the API counted it. The
ledger, the dispenser and the clock are the real ones; only the wire is left out, so that what is
seen is what the limits give away, and not what a machine can carry.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from django.db import connection

from callqueue import clocks
from callqueue.dispatch.dispenser import Dispenser
from callqueue.execution import claim, judging, recorder, telling, wire
from callqueue.transitions import Job
from tests.support.behaviour import response


class SlowApi:
    """Answers so many seconds after a call was sent. `sent`: monotonic instants, by rule."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.sent: defaultdict[str, list[float]] = defaultdict(list)
        self._inbox: list[int] = []
        self._waiting: list[tuple[float, int, Job]] = []
        self._answers: list[tuple[float, int, Job]] = []

    def run(self, seconds: float) -> None:
        """Release with a dispenser of its own, and send, for so many seconds."""
        stop = threading.Event()
        dispenser = threading.Thread(target=self._dispense, args=(stop,))
        dispenser.start()
        try:
            self._work(time.monotonic() + seconds)
        finally:
            stop.set()
            dispenser.join()

    def _dispense(self, stop: threading.Event) -> None:
        with ExitStack() as stack:
            stack.callback(connection.close)
            dispenser = Dispenser(publish=self._publish)
            stack.callback(dispenser.leave)
            dispenser.run(stop=stop)

    def _publish(self, using: str, messages: Any) -> bool:
        self._inbox.extend(pk for _, ids in messages for pk in ids)
        return True

    def _work(self, until: float) -> None:
        told = 0.0
        while time.monotonic() < until:
            self._begin()
            self._send()
            self._answer()
            if time.monotonic() - told >= telling.TELL:
                told = time.monotonic()
                telling.tell("default", [job for _, _, job in self._answers])
            time.sleep(0.002)

    def _begin(self) -> None:
        ids, self._inbox = self._inbox, []
        for job in claim.begin("default", ids) if ids else ():
            opens = job.slot_opens() or 0.0
            heapq.heappush(self._waiting, (opens, job.attempt_id, job))

    def _send(self) -> None:
        while self._waiting and self._waiting[0][0] <= clocks.monotonic():
            _, pk, job = heapq.heappop(self._waiting)
            job.gate = wire.Gate()
            job.gate.sent_at, job.gate.is_whole = clocks.monotonic(), True
            self.sent[job.rule_name].append(job.gate.sent_at)
            heapq.heappush(self._answers, (job.gate.sent_at + self.latency, pk, job))

    def _answer(self) -> None:
        ended = []
        while self._answers and self._answers[0][0] <= clocks.monotonic():
            _, _, job = heapq.heappop(self._answers)
            answer = wire.Answer(response(200, {}, b"{}"), job.gate.sent_at, sent=True)
            ended.append(judging.of_answer(job, answer))
        if ended:
            recorder.write("default", ended)
