"""Half of a load under permits, half queued, and processes of both kinds killed: the vendor's record
says whether the limit was kept, how much of it was used, and that nothing came twice.

What a killed process had been charged stays charged until its lease ends, and nobody uses it. So
the pace is judged by what was left: a charge that was kept for so many windows is so many requests.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from callqueue.models import CallAttempt, CallQueue, DispenserState
from tests.support.length import examples
from tests.support.processes import Processes, Running
from tests.support.recorder import Recorder, used_share
from tests.support.verdicts import never_over, on_a_quiet_machine, verdict, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.slow]
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
