"""A rule whose limits are used up, with a long backlog: a pass reads no more calls than can go, and
is not made before something can have changed. All of the limit is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from callqueue import Rule, SlidingWindow, TokenBucket, conf
from callqueue.dispatch.release_pass import ensure_states, release
from callqueue.ledger import ledger_time, ready_calls
from callqueue.models import CallAttempt, CallQueue
from tests.db.ledger.test_clock_jumps import Clocks, answer_all, at_command
from tests.support.ledger import CALL

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("trusted_workers")]

MINUTE, LATENCY = 60.0, 0.3
WAITING = 1500
TOKENS = {"cost": {"tokens": 100}}
PER_MINUTE = SlidingWindow("9000/m", unit="tokens")


class Minute:
    """What a dispenser does in a minute, by its own reckoning of when to look again."""

    def __init__(self, clock: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.passes, self.released, self.rows = clock, 0, 0, 0
        found = ready_calls._candidates

        def candidates(*args: Any, **options: Any) -> Any:
            listed = found(*args, **options)
            self.rows += len(listed)
            return listed

        monkeypatch.setattr(ready_calls, "_candidates", candidates)

    def run(self) -> None:
        end, answers_at = self.clock.mono + MINUTE, None
        while self.clock.mono < end:
            if answers_at is not None and self.clock.mono >= answers_at:
                answer_all(self.clock)
                answers_at = None
            done = release("default", ["r"])
            self.passes += 1
            self.released += len(done.released)
            if done.released and answers_at is None:
                answers_at = self.clock.mono + LATENCY
            look = done.next_look
            wakes = self.clock.mono + max(0.001, 0.05 if look.on_ready else look.after)
            if look.on_answer and answers_at is not None:
                wakes = min(wakes, answers_at)
            assert self.passes < 1000, f"{self.passes} passes, {self.rows} rows"
            self.clock.pass_by(wakes - self.clock.mono)


@pytest.mark.parametrize(
    ("rule", "options", "keys", "most"),
    [
        (Rule(limits=[SlidingWindow("500/m"), PER_MINUTE]), TOKENS, 1, 90),
        (Rule(limits=[SlidingWindow("9000/61s", unit="tokens")]), TOKENS, 1, 90),  # tallied
        (Rule(limits=[TokenBucket("100/s", burst=3000, unit="tokens")]), TOKENS, 1, 60),
        (Rule(limits=[SlidingWindow("900/m")]), {"cost": 10}, 1, 90),
        (Rule(limits=[SlidingWindow("45/m", per="queue")], queues=["e1", "e2"]), {}, 1, 90),
        (Rule(limits=[SlidingWindow("900/m", unit="tokens", per="key")]), TOKENS, 10, 90),
    ],
    ids=["tokens", "tallied", "bucket", "costly", "queues", "tokens of keys"],
)
def test_a_backlog_behind_a_limit_that_is_used_up_costs_little(
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    rule: Rule,
    options: Mapping[str, Any],
    keys: int,
    most: int,
) -> None:
    clock = at_command(monkeypatch)
    settings.CALLQUEUE = {"RULES": {"r": rule}}
    ensure_states("default", list(conf.current().rules))
    for key in range(keys):
        own = {"key": f"k{key}"} if keys > 1 else {}
        CallQueue.objects.send_many([CALL] * (WAITING // keys), rule="r", **options, **own)
    CallQueue.objects.update(due_at_dt=clock.wall)
    ledger_time.watch("default").look()
    clock.pass_by(1)
    Minute(clock, monkeypatch).run()
    second = Minute(clock, monkeypatch)
    second.run()
    assert CallAttempt.objects.count() >= 2 * most * 0.95
    assert second.released >= most * 0.95
    assert second.passes < 4 * 60 + 2 * second.released
    assert second.rows < 4 * (second.released + second.passes)
