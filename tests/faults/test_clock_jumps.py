"""The database server's clock is set by hours and days while calls go out: never over the limit,
and no stall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.stage import Stage
from tests.faults.test_databases import at, database, migrated  # noqa: F401
from tests.support import private
from tests.support.verdicts import on_a_quiet_machine, wait_until

LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/local/lib/faketime/libfaketimeMT.so.1")
HOUR, DAY = 3600, 86400
RATE = 20


class PostgresOfAnotherTime(private.Postgres):
    """A PostgreSQL whose clock is this machine's and so many seconds more or less, as `set_clock`
    says.
    """

    def prepare(self) -> None:
        self.library = private.program(*LIBRARIES)
        self.offset = self.home / "offset"
        self.set_clock(0)
        super().prepare()

    def environment(self) -> dict[str, str]:
        faked = {"LD_PRELOAD": self.library, "FAKETIME_TIMESTAMP_FILE": str(self.offset)}
        return {
            **super().environment(),
            **faked,
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set_clock(self, seconds: float) -> None:
        new = Path(f"{self.offset}.new")
        new.write_text(f"{seconds:+.3f}\n", "utf-8")
        new.chmod(0o644)
        new.replace(self.offset)


@pytest.fixture(scope="module")
def server() -> Iterator[private.Postgres]:
    with PostgresOfAnotherTime() as running:
        yield migrated(running)


@pytest.fixture
def stage(at: Callable[..., Stage], server: private.Postgres) -> Stage:  # noqa: F811
    return at(server.url, server)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispensers", "path", "jumps"),
    [
        (1, "/ok", [5, 0, HOUR, 0, -HOUR, 0, DAY, 0, -DAY, 0, 7 * DAY]),
        (
            2,
            "/delay?s=0.4",
            [0.05, 0, -0.05, 0.45, 0, -0.45, 0, HOUR, HOUR + 0.05, 0, -7 * DAY, 0, 7 * DAY],
        ),
    ],
)
def test_the_clock_is_set_while_calls_go_out(
    stage: Stage, server: PostgresOfAnotherTime, dispensers: int, path: str, jumps: list[float]
) -> None:
    """With calls under way, whose answers are recorded by a clock that has been set since they were
    begun.
    """
    stage.rule(RATE)
    for _ in range(2):
        stage.worker(concurrency=4)
    for _ in range(dispensers):
        stage.dispenser()
    stage.send(RATE * 4 * (len(jumps) + 2), path)
    wait_until(lambda: stage.vendor.count() > 2 * RATE, 30)
    for offset in jumps:
        seen = stage.vendor.count()
        server.set_clock(offset)
        wait_until(lambda seen=seen: stage.vendor.count() > seen + 3 * RATE, 20)
    stage.wait_for_all(120)
    assert stage.judge(unknown_allowed=False, recovery=None)["DONE"]
    arrivals = sorted(arrival.at for arrival in stage.vendor.arrivals())
    longest = max(later - earlier for earlier, later in pairwise(arrivals))
    with on_a_quiet_machine():
        assert longest < 2.2  # a window, and the work to be done
