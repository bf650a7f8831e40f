"""All that can release and make calls, on shared limits: killed, frozen, told to go at random."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from callqueue.models import CallAttempt, CallQueue, DispenserState
from tests.faults.stage import Keeper, judge_call
from tests.support.length import examples
from tests.support.processes import Processes, Running
from tests.support.recorder import Arrival, Recorder, most_at_once, used_share
from tests.support.verdicts import (
    never_over,
    on_a_quiet_machine,
    until_none_is_left,
    verdict,
    wait_until,
)

Status = CallQueue.Status
pytestmark = [pytest.mark.fault, pytest.mark.slow]
SETTINGS = """
retry = Retry(max_attempts=60, base=0.05, factor=1.0, jitter=False)
of_all = dict(queues="QUEUE", total_timeout=2, retry=retry)
CALLQUEUE = {
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "LEASE": {"RELEASE": 1.5, "GRACE": 0.5},
    "RULES": {
        "a": Rule(limits=[SlidingWindow("60/2s", name="shared")], **of_all),
        "b": Rule(limits=[SlidingWindow("60/2s", name="shared")], **of_all),
        "keyed": Rule(limits=[SlidingWindow("10/2s", per="key")], **of_all),
        "few": Rule(limits=[Concurrency(4)], **of_all),
    },
}
CELERY_WORKER_LOST_WAIT = 1.0
CELERY_BEAT_SCHEDULE = {
    "dispenser": {
        "task": "callqueue.dispenser", "schedule": 1.0, "options": {"expires": 1.0, "queue": "QUEUE"},
    },
}
"""
RULES, KEYS, FEW = ("a", "b", "keyed", "few"), 3, 4
DEEDS = ("kill", "stop", "end", "child")
FROZEN = (0.3, 1.0, 4.0)  # seconds
# seconds until all have begun, for which nothing is done to anybody
BEGINNING = 3.0


@pytest.mark.parametrize("releases", ["all that can", "workers alone"])
def test_makers_beside_each_other_at_random(
    processes: Processes,
    vendor: Recorder,
    configure: Callable[[str], None],
    length: Callable[[Any, Any], Any],
    releases: str,
) -> None:
    """The seed makes the choices, the machine the moments."""
    seed = int(os.environ.get("CALLQUEUE_TEST_SEED", "1"))
    seconds = float(os.environ.get("CALLQUEUE_TEST_SECONDS", length(20, 120)))
    dice = random.Random(seed)
    configure(SETTINGS.replace('"QUEUE"', repr(processes.broker.queue("one"))))
    calls = Calls(vendor, dice)
    worker: Callable[[], Running] = lambda: processes.worker("one", wait=False)  # noqa: E731
    makers = [worker, worker]
    if releases == "all that can":
        makers += [processes.run, processes.run, processes.dispenser, processes.beat]
    with Keeper(makers) as keeper:
        calls.send("a", 30)
        wait_until(lambda: vendor.count() >= 10, 60)
        began = time.monotonic()
        calls.keep_coming(Misfortunes(dice, keeper, began), began + seconds)
        ended = time.monotonic()
        unfinished = CallQueue.objects.filter(status__in=(0, 1, 2))
        until_none_is_left(lambda: Counter(unfinished.values_list("rule", "status")), 240, stuck=60)
    arrivals = vendor.arrivals()
    calls.judge(arrivals)
    own = [one for one in arrivals if began <= one.at < ended]
    shared = sum(one.query["rule"] in ("a", "b") for one in own) / (30 * (ended - began))
    print(f"seed {seed}: {keeper.restarts} restarts, {shared:.3f} of the shared limit used")
    if releases == "all that can":
        with on_a_quiet_machine():  # a process that is frozen in a pass keeps the rules for 5 s
            assert shared >= 0.5


class Calls:
    """Calls that the vendor's record can be told apart by, of each rule as many as it takes."""

    def __init__(self, vendor: Recorder, dice: random.Random) -> None:
        self.vendor, self.dice = vendor, dice
        self.numbers: dict[int, int] = {}  # by primary key

    def send(self, rule: str, count: int) -> None:
        first, data = len(self.numbers), list[dict[str, Any]]()
        for number in range(first, first + count):
            key, is_slow = str(number % KEYS), rule == "few" or self.dice.random() < 0.3
            path = "/delay?s=0.1&" if is_slow else "/ok?"
            url = self.vendor.url(f"{path}call={number}&rule={rule}&key={key}")
            made = {"method": self.dice.choice(["post", "put"]), "params": {"url": url}}
            data.append({"call_data": made, "key": key if rule == "keyed" else ""})
        sent = CallQueue.objects.send_many(data, rule=rule)
        self.numbers.update({call.pk: first + n for n, call in enumerate(sent)})

    def keep_coming(self, misfortunes: Misfortunes, until: float) -> None:
        """A backlog of each rule, and misfortunes, until then."""
        while time.monotonic() < until:
            waiting = CallQueue.objects.filter(status__in=(0, 1, 2))
            backlog = Counter(waiting.values_list("rule", flat=True))
            for rule in RULES:
                if backlog[rule] < 200:
                    self.send(rule, 100)
            misfortunes.come_by()
            time.sleep(0.05)
        misfortunes.thaw(for_ever=True)

    @verdict()
    def judge(self, arrivals: Sequence[Arrival]) -> None:
        """Never over, nothing lost, nothing twice; UNKNOWN is what may have arrived."""
        assert not CallAttempt.objects.open().exists()
        of_rule = {rule: [one for one in arrivals if one.query["rule"] == rule] for rule in RULES}
        never_over([one.at for one in (*of_rule["a"], *of_rule["b"])], 60, 2.0, "the shared limit")
        for key in map(str, range(KEYS)):
            own = [one.at for one in of_rule["keyed"] if one.query["key"] == key]
            never_over(own, 10, 2.0, f"the limit of key {key}")
        # one whose client was killed is at work for as long as its answer would have taken
        few = [replace(one, answered_at=one.answered_at or one.at + 0.1) for one in of_rule["few"]]
        assert most_at_once(few) <= FEW, "too many at once"
        seen: dict[int, list[Arrival]] = {number: [] for number in self.numbers.values()}
        for one in arrivals:
            seen[int(one.query["call"])].append(one)
        columns = ("pk", "status", "method", "error_message")
        for call in CallQueue.objects.values_list(*columns, named=True):
            judge_call(call, seen[self.numbers[call.pk]])


class Misfortunes:
    """What is done to processes, every few seconds."""

    def __init__(self, dice: random.Random, keeper: Keeper, began: float) -> None:
        self.dice, self.keeper = dice, keeper
        self.next_at = began + BEGINNING
        self.frozen: list[tuple[float, int]] = []  # until when, whose group

    def come_by(self) -> None:
        self.thaw()
        if time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + self.dice.uniform(0.5, 4.0)
        running, deed = self.dice.choice(self.keeper.running), self.dice.choice(DEEDS)
        with suppress(ProcessLookupError):
            if deed == "kill":
                os.killpg(running.pid, signal.SIGKILL)
            elif deed == "stop":
                os.killpg(running.pid, signal.SIGSTOP)
                self.frozen.append((time.monotonic() + self.dice.choice(FROZEN), running.pid))
            elif deed == "end":
                running.process.terminate()
            elif children := running.children():
                os.kill(self.dice.choice(children), signal.SIGKILL)

    def thaw(self, *, for_ever: bool = False) -> None:
        """Those whose time is over; or all."""
        now = time.monotonic()
        for until, pid in list(self.frozen):
            if for_ever or until <= now:
                self.frozen.remove((until, pid))
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGCONT)


# --- Permits beside a queue

PEERS = 8
PACE = 0.9  # of what was possible under the limit of a second


@pytest.mark.parametrize("is_killed", [False, True], ids=["nobody killed", "kill -9"])
def test_eight_processes_with_permits_and_a_queue_keep_the_limit_whoever_is_killed(
    processes: Processes, vendor: Recorder, configure: Callable[[str], None], is_killed: bool
) -> None:
    queue = processes.broker.queue("one")
    limits = '[SlidingWindow("20/s", jitter=0.05), SlidingWindow("500/m")]'
    configure(
        'CALLQUEUE = {"ALLOWED_NETWORKS": ["127.0.0.0/8"], "LEASE": {"RELEASE": 5, "GRACE": 1},'
        f' "RULES": {{"r": Rule(queues={queue!r}, total_timeout=2, limits={limits})}}}}'
    )
    seconds = examples(12, 45)
    workers = [processes.worker("one", concurrency=4) for _ in range(2)]
    dispensers = [processes.dispenser() for _ in range(2)]
    wait_until(lambda: DispenserState.objects.exclude(digest="").count() == 2, 60)
    peers = [_peer(processes, vendor) for _ in range(PEERS)]
    for peer in peers:
        peer.wait_for_log("permit peer ready")
    for _ in range(3):
        _send_evenly(vendor, seconds / 3)
        for kind, start in (
            (peers, lambda: _peer(processes, vendor)),
            (workers, lambda: processes.worker("one", concurrency=4, wait=False)),
            (dispensers, processes.dispenser),
        ):
            if is_killed:
                kind.pop(0).kill()
                kind.append(start())
    for one in [*dispensers, *peers, *workers]:
        one.kill()
    arrivals = sorted(vendor.arrivals(), key=lambda arrival: arrival.at)
    instants = [arrival.at for arrival in arrivals]
    never_over(instants, 20, 1.0)
    never_over(instants, 500, 60.0)
    permits = Counter(one.target for one in arrivals if "permit=" in one.target)
    calls = [one for one in arrivals if "permit=" not in one.target]
    keys = Counter(one.idempotency_key for one in calls)
    with verdict():
        assert max(permits.values(), default=1) == max(keys.values(), default=1) == 1
        assert len(instants) <= CallAttempt.objects.count()
    use, of_second = len(instants) / _most(seconds), instants[:480]
    pace, kept = used_share(of_second, 20, 1.0), _kept_by_the_dead(of_second)
    possible = 1.0 - kept / (20 * (of_second[-1] - of_second[0]))
    print(
        f"{len(permits)} permits, {len(keys)} calls, use {use:.3f}; of 20/s alone {pace:.3f}, where"
        f" the dead kept {kept:.1f} requests, so that {possible:.3f} were possible"
    )
    with on_a_quiet_machine():
        assert len(permits) > 20 and len(keys) > 20
        assert use >= 0.94 and pace >= PACE * possible


def _kept_by_the_dead(instants: Sequence[float]) -> float:
    """Requests that the limit would have admitted instead of what the dead were charged with."""
    lost = CallAttempt.objects.filter(outcome__in=["lost", "voided", ""])
    last = time.time() - time.monotonic() + instants[-1]  # the vendor's clock is monotonic
    return sum(
        max(0.0, (last if end is None else min(end.timestamp(), last)) - begin.timestamp())
        for begin, end in lost.values_list("released_at", "finished_at")
    )


def _most(seconds: float) -> float:
    """What both limits admit in so many seconds: twenty in each, but five hundred a minute."""
    minutes, rest = divmod(seconds, 60)
    return float(500 * minutes + min(20 * rest, 500))


def _send_evenly(vendor: Recorder, seconds: float) -> None:
    """Ten calls a second: half of the limit. Permits of the same priority have the rest."""
    end, sent = time.monotonic() + seconds, 0
    began = time.monotonic()
    while time.monotonic() < end:
        owed = round(10 * (time.monotonic() - began)) - sent
        data = {"method": "post", "params": {"url": vendor.url("/ok"), "json": {}}}
        CallQueue.objects.send_many([data] * owed, rule="r")
        sent += owed
        time.sleep(0.1)


def _peer(processes: Processes, vendor: Recorder) -> Running:
    command = [sys.executable, "-m", "tests.support.permit_process", vendor.url("/ok")]
    return processes.start("peer", command)
