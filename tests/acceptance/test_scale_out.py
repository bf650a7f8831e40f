"""Four worker hosts with an address each, limits per address, and one host that is cut off from the
network for a while.

The hosts are network namespaces; database, broker, vendor and dispenser are at a fifth address. The
vendor's record, which says where each request came from, is the judge.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any

import pytest

from callqueue.models import CallQueue
from tests.faults.stage import Keeper
from tests.support import servers
from tests.support.hosts import Host, Network, NotPermitted
from tests.support.processes import ROOT, Processes, Running
from tests.support.recorder import Arrival, Recorder
from tests.support.verdicts import (
    never_over,
    on_a_quiet_machine,
    until_none_is_left,
    verdict,
    wait_until,
)

Status = CallQueue.Status
HOSTS = 4
RATE = 10  # calls a second, for each address
CUT = 4.0  # seconds: longer than a call may take, and its lease after it

SETTINGS = """
CELERY_BROKER_HEARTBEAT = 2  # else the broker keeps what a host that was cut off holds there, and turns it away when it is back
CALLQUEUE = {{
    "ALLOWED_NETWORKS": [{network!r}],
    "LEASE": {{"RELEASE": 1.5, "GRACE": 0.5}},
    "RULES": {{
        "r": Rule(queues={queues!r}, limits=[SlidingWindow("{rate}/s", per="queue")], total_timeout=2.0,
                  retry=Retry(max_attempts=60, base=0.05, factor=1.0, jitter=False)),
    }},
}}
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(HOSTS) as made:
            for server in ("postgresql", "rabbitmq"):
                url = servers.address(server)
                made.forward(url.host, int(url.port))
            yield made
    except NotPermitted as error:
        pytest.skip(f"no network of our own: {error}")


@pytest.fixture
def hub(network: Network) -> Iterator[Recorder]:
    """The vendor, at the fifth address."""
    with Recorder(host=network.address) as recorder:
        yield recorder


@dataclass
class Fleet:
    """One rule, a queue for each host, a worker on each, and numbered calls."""

    network: Network
    vendor: Recorder
    processes: Processes

    def queue(self, host: Host) -> str:
        return f"from-{self.network.hosts.index(host)}"

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A worker on each host, started again when it ends, as systemd or Kubernetes would; and a
        dispenser.
        """
        with Keeper([partial(self.worker, host) for host in self.network.hosts]) as kept:
            for worker in kept.running:
                worker.wait_for_log(" ready.")
            self.processes.dispenser()
            yield

    def worker(self, host: Host) -> Running:
        there = {name: servers.address(server).text for server, name in _VARIABLES.items()}
        environment = {
            name: url.replace("127.0.0.1", self.network.address) for name, url in there.items()
        }
        return self.processes.worker(
            self.queue(host), concurrency=3, wait=False, inside=host.command(**environment)
        )

    def send(self, count: int, path: str) -> dict[int, CallQueue]:
        """Two POSTs for each GET, so that every queue has both; by the number in their URL."""
        data = [
            {
                "method": ("get", "post", "post")[n % 3],
                "params": {"url": self.vendor.url(path, call=n, s=0.2)},
            }
            for n in range(count)
        ]
        return dict(enumerate(CallQueue.objects.send_many(data, rule="r")))

    def arrivals_from(self, host: Host) -> list[Arrival]:
        return [arrival for arrival in self.vendor.arrivals() if arrival.peer == host.address]


_VARIABLES = {"postgresql": "CALLQUEUE_TEST_PG_URL", "rabbitmq": "CALLQUEUE_TEST_BROKER_URL"}


@pytest.fixture
def fleet(
    network: Network, hub: Recorder, processes: Processes, configure: Callable[[str], None]
) -> Iterator[Fleet]:
    made = Fleet(network, hub, processes)
    queues = [processes.broker.queue(made.queue(host)) for host in network.hosts]
    configure(SETTINGS.format(network=network.range, queues=queues, rate=RATE))
    yield made
    for running in processes.started:
        running.kill()


def in_flight(fleet: Fleet, host: Host) -> bool:
    return any(arrival.answered_at is None for arrival in fleet.arrivals_from(host))


def left() -> Counter[int]:
    """The calls that have not ended, by status."""
    unfinished = CallQueue.objects.filter(status__in=(Status.NEW, Status.DISPATCHED, Status.ERROR))
    return Counter(unfinished.values_list("status", flat=True))


@pytest.mark.slow
@pytest.mark.server("rabbitmq")
@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_each_address_keeps_its_limit_while_one_host_is_cut_off_and_comes_back(
    fleet: Fleet, broker: Any
) -> None:
    calls = fleet.send(560, "/delay")
    lonely, *others = fleet.network.hosts
    with fleet.at_work():
        fleet.vendor.wait_for(3 * RATE)
        wait_until(lambda: in_flight(fleet, lonely), 20)
        lonely.cut()
        cut_at = monotonic()
        sleep(CUT)
        lonely.mend()
        mended_at = monotonic()
        until_none_is_left(left, 60)
    by_host = {host: fleet.arrivals_from(host) for host in fleet.network.hosts}
    assert sum(map(len, by_host.values())) == fleet.vendor.count()
    judge_limits(by_host)
    during = {
        host: sum(cut_at + 0.1 < a.at < mended_at for a in arrived)
        for host, arrived in by_host.items()
    }
    assert during[lonely] == 0
    with on_a_quiet_machine():
        assert all(during[host] > RATE * CUT / 2 for host in others), during
        # before the others have made all that there was
        assert any(arrival.at > mended_at for arrival in by_host[lonely]), "it never came back"
    judge_calls(calls, fleet.vendor.arrivals())


@verdict()
def judge_limits(by_host: dict[Host, list[Arrival]]) -> None:
    for host, arrived in by_host.items():
        assert arrived, f"nothing came from {host.address}"
        never_over(
            [arrival.at for arrival in arrived], RATE, 1.0, of=f"the limit of {host.address}"
        )


@verdict()
def judge_calls(calls: dict[int, CallQueue], arrivals: list[Arrival]) -> None:
    """Nothing lost; a POST at most once, and UNKNOWN where its answer was lost; a GET until it was
    answered.
    """
    arrived = Counter(int(arrival.query["call"]) for arrival in arrivals)
    ended = dict(CallQueue.objects.values_list("pk", "status"))
    assert set(ended) == {call.pk for call in calls.values()}
    unknown = 0
    for number, call in calls.items():
        story = f"call {number} ({call.method}) is {Status(ended[call.pk]).name} and arrived {arrived[number]} times"
        if call.method == "get":
            assert ended[call.pk] == Status.DONE and arrived[number] >= 1, story
        elif ended[call.pk] == Status.UNKNOWN:
            unknown += 1
            assert arrived[number] <= 1, story
        else:
            assert ended[call.pk] == Status.DONE and arrived[number] == 1, story
    assert 0 < unknown <= 2 * RATE, f"{unknown} calls are UNKNOWN"


GIVES_UP = """
import sys
import requests
from callqueue.execution import wire

url, network = sys.argv[1:]
policy = wire.Policy(allowed_networks=(network,))
session = requests.Session()
session.trust_env = False


def with_requests():
    try:
        session.get(f"{url}?who=requests", timeout=0.3)
    except requests.Timeout:
        session.close()


def with_the_client():
    wire.request("get", {"url": f"{url}?who=the-client"}, policy=policy, timeouts=wire.Timeouts(total=0.3))


for _ in range(2):  # once to connect, once when the host has been cut off
    with_requests()
    with_the_client()
    print("went", flush=True)
    sys.stdin.readline()
"""


def test_what_was_given_up_while_cut_off_does_not_arrive_afterwards(
    network: Network, hub: Recorder
) -> None:
    """What requests gave up does: its kernel goes on to deliver it. That is how long to wait before
    judging.
    """
    host = network.hosts[0]
    command = [*host.command(), sys.executable, "-c", GIVES_UP, hub.url("/ok"), network.range]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        assert client.stdout.readline() == "went\n"
        assert Counter(arrival.query["who"] for arrival in hub.arrivals()) == {
            "requests": 1,
            "the-client": 1,
        }
        host.cut()
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "went\n"
        host.mend()
        hub.wait_for(3)
        sleep(1.5)  # the kernel's own pause between two tries, by now
        client.stdin.write("\n")
    assert Counter(arrival.query["who"] for arrival in hub.arrivals()) == {
        "requests": 2,
        "the-client": 1,
    }
