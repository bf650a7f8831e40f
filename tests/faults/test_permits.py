"""Half of a load under permits, half queued, and processes of both kinds killed: the vendor's record
says whether the limit was kept, how much of it was used, and that nothing came twice.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from callqueue.models import CallAttempt, CallQueue
from tests.support.length import examples
from tests.support.processes import Processes, Running
from tests.support.recorder import Recorder, used_share
from tests.support.verdicts import never_over, on_a_quiet_machine, verdict

pytestmark = [pytest.mark.fault, pytest.mark.slow]
PEERS = 8


def test_eight_processes_with_permits_and_a_queue_keep_the_limit_whoever_is_killed(
    processes: Processes, vendor: Recorder, configure: Callable[[str], None]
) -> None:
    queue = processes.broker.queue("one")
    limits = '[SlidingWindow("20/s", jitter=0.05), SlidingWindow("500/m")]'
    configure(
        'CALLQUEUE = {"ALLOWED_NETWORKS": ["127.0.0.0/8"], "LEASE": {"RELEASE": 5, "GRACE": 1},'
        f' "RULES": {{"r": Rule(queues={queue!r}, total_timeout=2, limits={limits})}}}}'
    )
    seconds = examples(12, 45)
    peers = [_peer(processes, vendor) for _ in range(PEERS)]
    workers = [processes.worker("one", concurrency=4) for _ in range(2)]
    for peer in peers:
        peer.wait_for_log("permit peer ready")
    dispensers = [processes.dispenser() for _ in range(2)]
    for _ in range(3):
        _send_evenly(vendor, seconds / 3)
        for kind, start in (
            (peers, lambda: _peer(processes, vendor)),
            (workers, lambda: processes.worker("one", concurrency=4, wait=False)),
            (dispensers, processes.dispenser),
        ):
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
    use, pace = len(instants) / _most(seconds), used_share(instants[:480], 20, 1.0)
    print(
        f"{len(permits)} permits, {len(keys)} calls, use {use:.3f}, before the minute's {pace:.3f}"
    )
    with on_a_quiet_machine():
        assert len(permits) > 20 and len(keys) > 20
        assert use >= 0.94 and pace >= 0.6, "though every process is killed in turn"


def _most(seconds: float) -> float:
    """What both limits admit in so many seconds: twenty in each, but five hundred a minute."""
    minutes, rest = divmod(seconds, 60)
    return float(500 * minutes + min(20 * rest, 500))


def _send_evenly(vendor: Recorder, seconds: float) -> None:
    """Ten calls a second: half of the limit. Permits of the same priority, asked for all the time,
    have the rest.
    """
    end, sent = time.monotonic() + seconds, 0
    began = time.monotonic()
    while time.monotonic() < end:
        owed = round(10 * (time.monotonic() - began)) - sent
        data = {"method": "post", "params": {"url": vendor.url("/ok"), "json": {}}}
        CallQueue.objects.send_many([data] * owed, rule="r")
        sent += owed
        time.sleep(0.1)


def _peer(processes: Processes, vendor: Recorder) -> Running:
    command = [sys.executable, "-m", "tests.support.permit_peer", vendor.url("/ok")]
    return processes.start("peer", command)
