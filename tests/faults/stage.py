"""A scene for faults: a rule with short leases, a vendor, processes that come back when they are
killed, and a judge.

The judge goes by the vendor's record: every committed call reached one final state; a call that is
not idempotent arrived at most once, else the call says UNKNOWN; an idempotent one at least once;
one idempotency key for all attempts of a call; no window over the limit; nothing open past its
lease and one round of recovery.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from callqueue.models import CallAttempt, CallQueue
from tests.faults import sabotage
from tests.support.processes import Processes, Running
from tests.support.recorder import Arrival, Recorder
from tests.support.verdicts import (
    never_over,
    on_a_quiet_machine,
    until_none_is_left,
    verdict,
    wait_until,
)

Status = CallQueue.Status
FINAL = (Status.DONE, Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.UNKNOWN)
# seconds that a round of recovery may take to come by on a busy machine, every half second as it
# should
RECOVERY = 3.0
RELEASE, GRACE, TOTAL = 1.5, 0.5, 2.0
# seconds beyond a call's leases in which something must have happened to it, or it never will
STUCK = 25.0

SETTINGS = """
CALLQUEUE = {{
    "ALLOWED_NETWORKS": ["127.0.0.0/8"],
    "LEASE": {{"RELEASE": {release}, "GRACE": {grace}}},
    "DISPENSER": {{"IN_WORKERS": {in_workers}}},
    "RULES": {{
        "r": Rule(queues={queue!r}, limits=[SlidingWindow("{rate}/s")], total_timeout={total},
                  retry=Retry(max_attempts=60, base=0.05, factor=1.0, jitter=False)),
    }},
    {extra}
}}
"""
# For what is started. Else a killed child's place in the pool stays taken for ten seconds.
SABOTAGE = """
from tests.settings import INSTALLED_APPS
INSTALLED_APPS = [*INSTALLED_APPS, "tests.faults.sabotage.Sabotage"]
CELERY_WORKER_LOST_WAIT = 1.0
"""


@dataclass
class Stage:
    """One rule `r` of so many calls a second on one queue, and a vendor that records."""

    processes: Processes
    vendor: Recorder
    configure: Callable[[str], None]
    place: Path
    rate: int = 100
    numbers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.place / "sabotage"
        self.folder.mkdir(exist_ok=True)
        self.rule()

    def rule(
        self,
        rate: int = 100,
        *,
        total: float = TOTAL,
        release: float = RELEASE,
        extra: str = "",
        in_workers: int = 0,
    ) -> None:
        """Settings of what is started from now on. Workers release nothing, unless they are to."""
        self.rate, self.release, self.total = rate, release, total
        queue = self.processes.broker.queue("one")
        values = {"release": release, "grace": GRACE, "rate": rate, "total": total}
        self.configure(SETTINGS.format(**values, in_workers=in_workers, queue=queue, extra=extra))
        settings = (self.processes.folder / "settings_of_this_test.py").read_text("utf-8")
        self.processes.configure(settings + SABOTAGE, name="settings_with_sabotage")
        self.processes.environment["CALLQUEUE_TEST_SABOTAGE"] = str(self.folder)

    def add_settings(self, source: str) -> None:
        """More settings, for what is started from now on and not for this process."""
        path = self.processes.folder / "settings_with_sabotage.py"
        self.processes.configure(f"{path.read_text('utf-8')}\n{source}\n", name=path.stem)

    def plant(self, point: str, *deeds: str) -> None:
        sabotage.plant(self.folder, point, *deeds)

    def wait_until_struck(self, seconds: float = 30.0) -> None:
        wait_until(
            lambda: not sabotage.left(self.folder),
            seconds,
            lambda: f"never struck: {sabotage.left(self.folder)}",
        )

    # --- Calls

    def send(
        self,
        count: int = 1,
        path: str = "/ok",
        method: str = "post",
        **options: Any,
    ) -> list[CallQueue]:
        """Each has a number of its own in its URL, by which the vendor's record tells it."""
        first, data = len(self.numbers), list[Any]()
        for number in range(first, first + count):
            url = self.vendor.url(f"{path}{'&' if '?' in path else '?'}call={number}")
            data.append({"method": method, "params": {"url": url, "json": {"n": number}}})
        calls = CallQueue.objects.send_many(data, rule="r", **options)
        self.numbers.update({call.pk: first + i for i, call in enumerate(calls)})
        return calls

    def arrivals_of(self, call: CallQueue) -> list[Arrival]:
        number = str(self.numbers[call.pk])
        return [one for one in self.vendor.arrivals() if one.query.get("call") == number]

    # --- Processes

    def worker(
        self,
        concurrency: int = 2,
        arguments: Sequence[str] = (),
        *,
        wait: bool = True,
        pool: str = "prefork",
    ) -> Running:
        return self.processes.worker(
            "one", concurrency=concurrency, arguments=arguments, wait=wait, pool=pool
        )

    def dispenser(self) -> Running:
        return self.processes.dispenser()

    def run(self) -> Running:
        """Releases calls, and makes them itself."""
        return self.processes.run()

    def keep(self, *makers: Callable[[], Running]) -> Keeper:
        """Started again whenever they die: what systemd or Kubernetes would do."""
        return Keeper(list(makers))

    # --- Waiting

    def wait_for_all(self, seconds: float = 30.0) -> None:
        """Return once every call has ended; a Verdict if nothing happens to one any more."""
        until_none_is_left(self._left, seconds, stuck=STUCK + self.release + self.total + GRACE)

    def _left(self) -> Any:
        """What has not ended, by status and by attempts; None if all has."""
        if not CallQueue.objects.exclude(status__in=FINAL).exists():
            return None
        return (
            Counter(CallQueue.objects.values_list("status", flat=True)),
            CallAttempt.objects.count(),
            self.open_attempts(),
        )

    def release_until_all_have_ended(self) -> None:
        """Have the vendor answer whatever it holds."""
        waiting = CallQueue.objects.filter(status__in=(0, 1, 2))
        wait_until(lambda: self.vendor.release() >= 0 and not waiting.exists(), 60)

    def wait_for_status(self, call: CallQueue, *statuses: int, seconds: float = 20.0) -> None:
        def has_it() -> bool:
            call.refresh_from_db()
            return call.status in statuses

        def story() -> str:
            return f"{call} is {call.status}: {call.error_message}, {list(call.attempts.values())}"

        wait_until(has_it, seconds, story)

    def open_attempts(self) -> list[Any]:
        columns = ("pk", "call_id", "number", "started_at", "lease_until", "worker")
        return list(CallAttempt.objects.open().values(*columns)[:5])

    # --- The judge

    @verdict()
    def judge(
        self, *, unknown_allowed: bool = True, recovery: float | None = RECOVERY
    ) -> Counter[str]:
        """All that must be true after any fault, by the vendor's record; counts by status."""
        by_number: dict[str, list[Arrival]] = {}
        arrivals = self.vendor.arrivals()
        for arrival in arrivals:
            by_number.setdefault(arrival.query["call"], []).append(arrival)
        columns = ("pk", "status", "method", "error_message")
        ended = list(CallQueue.objects.values_list(*columns, named=True))
        assert {call.pk for call in ended} == set(self.numbers), "vanished, or come from nowhere"
        for call in ended:
            seen = by_number.pop(str(self.numbers[call.pk]), [])
            judge_call(call, seen, unknown_allowed)
        assert not by_number, f"arrived, and nobody sent it: {by_number}"
        never_over([arrival.at for arrival in arrivals], self.rate, 1.0)
        assert not CallAttempt.objects.open().exists(), self.open_attempts()
        if recovery is not None:
            self._judge_leases(recovery)
        return Counter(Status(call.status).name for call in ended)

    def _judge_leases(self, recovery: float) -> None:
        late = timedelta(seconds=recovery)
        columns = ("pk", "outcome", "finished_at", "lease_until")
        for attempt in CallAttempt.objects.exclude(lease_until=None).values(*columns):
            with on_a_quiet_machine():
                assert attempt["finished_at"] <= attempt["lease_until"] + late, attempt


def judge_call(call: Any, seen: list[Arrival], unknown_allowed: bool = True) -> None:
    """Whether what became of a call is what arrived of it."""
    attempts = CallAttempt.objects.filter(call_id=call.pk)
    story = (
        f"call {call.pk} ({call.method}) is {Status(call.status).name}: {call.error_message!r}; {len(seen)} arrivals; "
        f"{list(attempts.values_list('number', 'outcome', 'error_message'))}"
    )
    keys = {arrival.idempotency_key for arrival in seen}
    assert len(keys) <= 1, f"{story}; keys {keys}"
    is_unknown = call.status == Status.UNKNOWN and call.method == "post" and unknown_allowed
    assert is_unknown or (call.status == Status.DONE and seen), story
    assert call.method != "post" or len(seen) <= 1, story
    if call.method in ("post", "put"):
        assert None not in keys, story


class Keeper:
    """Starts processes, and starts them again when they end, until the block is left."""

    def __init__(self, makers: list[Callable[[], Running]]) -> None:
        self.makers = makers
        self.running: list[Running] = []
        self.restarts = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Keeper:
        self.running = [make() for make in self.makers]
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            for place, make in enumerate(self.makers):
                if not self.running[place].is_alive() and not self._stop.is_set():
                    self.running[place].kill()  # what is left of its group
                    self.restarts += 1
                    self.running[place] = make()
