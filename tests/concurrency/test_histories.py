"""Histories of settings: deployments, rollbacks, rules linked and unlinked, several at once; and an
adversary who counts.

Hypothesis chooses the steps; every pass is the real one. What each attempt was charged to is noted
by this file alone: the limits that any dispenser alive had for its rule when it was released.
CALLQUEUE_EXAMPLES=200 looks longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as chosen_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from callqueue import (
    Concurrency,
    FixedWindow,
    Rule,
    SlidingWindow,
    TokenBucket,
    clocks,
    conf,
    database,
    transitions,
)
from callqueue.database import server_clock
from callqueue.ledger import clock_jumps, settings, tallies
from callqueue.limits.budgets import bind, key_part
from callqueue.limits.kinds import Limit
from callqueue.models import (
    CallAttempt,
    CallQueue,
    DispenserState,
    Hold,
    KeyNews,
    KeyTurn,
    OpinionState,
    RuleState,
    SettingsState,
    Tally,
)
from tests.support.dispensers import Process
from tests.support.length import examples

EXAMPLES = examples(15, 200)
STEPS = 40
ACCOUNT, LINK = SlidingWindow("4/m", name="account"), SlidingWindow("900/h", name="link")
OWN, LONGER, SMALLER = SlidingWindow("3/m"), SlidingWindow("5/10m"), SlidingWindow("2/m")
KEYED, NAMED = SlidingWindow("2/m", per="key"), SlidingWindow("3/m", per="part")
BUCKET, BURST, DAY, ONCE = (
    TokenBucket("3/m", burst=3),
    TokenBucket("3/m", burst=5),
    FixedWindow("6/d"),
    Concurrency(2),
)
SETTINGS = [
    {"a": Rule(limits=[ACCOUNT]), "b": Rule(limits=[ACCOUNT])},
    {"b": Rule(limits=[ACCOUNT])},
    {"a": Rule(limits=[ACCOUNT]), "b": Rule(limits=[OWN])},
    {
        "a": Rule(limits=[SlidingWindow("2/m", name="account")]),
        "b": Rule(limits=[OWN, LINK]),
        "c": Rule(limits=[LINK, KEYED]),
    },
    {"a": Rule(limits=[LONGER]), "b": Rule(limits=[OWN, LINK]), "c": Rule(limits=[LINK, SMALLER])},
    {
        "a": Rule(limits=[KEYED]),
        "b": Rule(limits=[NAMED, ACCOUNT]),
        "c": Rule(limits=[KEYED, ACCOUNT]),
    },
    {"a": Rule(limits=[NAMED, ONCE]), "b": Rule(limits=[BUCKET]), "c": Rule(limits=[DAY])},
    {"a": Rule(limits=[OWN]), "b": Rule(limits=[BURST, LINK]), "c": Rule(limits=[ACCOUNT, DAY])},
    {"a": Rule(limits=[LINK]), "b": Rule(limits=[OWN, LINK])},
    {"a": Rule(limits=[LINK]), "b": Rule(limits=[OWN])},
    {"a": Rule(limits=[LINK]), "b": Rule(limits=[BUCKET, LINK])},
    {"a": Rule(limits=[LINK]), "b": Rule(limits=[BUCKET])},
    {"a": Rule(), "b": Rule(limits=[SMALLER]), "c": Rule(limits=[OWN])},
]
ANY = st.integers(0, len(SETTINGS) - 1)
FAMILIES = [
    [0, 1],
    [0, 2, 1],
    [3, 4],
    [5, 6, 7],
    [8, 9],
    [10, 11],
]  # those that differ in one thing or two
KEYS = [{"key": "K1", "part": "P1"}, {"key": "K1", "part": "P2"}, {"key": "K2", "part": "P1"}]
PROCESSES = st.sampled_from([0, 0, 0, 0, 1, 2])
real_monotonic = clocks.monotonic


class Histories(RuleBasedStateMachine):
    """Up to three dispensers, each with settings of its own; workers that answer late, or not; an
    operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.processes: dict[int, Process] = {}
        self.charged: dict[int, set[str]] = {}  # by attempt: the limits that it counts in
        self.rates: dict[str, str] = {}
        self.later = 0.0

    @initialize(pool=st.sampled_from(FAMILIES) | st.lists(ANY, min_size=2, max_size=3, unique=True))
    def start(self, pool: list[int]) -> None:
        self.pool = pool  # a history goes back and forth between few settings
        for model in (
            CallAttempt,
            CallQueue,
            Hold,
            RuleState,
            DispenserState,
            KeyNews,
            KeyTurn,
            Tally,
            SettingsState,
            OpinionState,
        ):
            model.objects.all().delete()
        enter = self.patches.enter_context
        enter(patch.object(clock_jumps, "_watches", {}))
        enter(patch.object(settings, "_books", {}))
        enter(patch.object(server_clock, "ahead", timedelta(0)))
        enter(patch.object(clocks, "monotonic", lambda: real_monotonic() + self.later))
        enter(patch.object(tallies, "COARSE", 2))  # so that small windows are tallied too
        enter(patch.object(tallies, "ROOMY", 1))
        self.deploy(0, 0)

    def teardown(self) -> None:
        self.patches.close()

    # What happens to settings.

    @rule(number=PROCESSES, which=st.integers(0, 2))
    def deploy(self, number: int, which: int) -> None:
        process = self.processes.setdefault(number, Process(f"process{number}"))
        process.book = bind(SETTINGS[self.pool[which % len(self.pool)]])
        process.joins()

    @rule(
        number=PROCESSES,
        which=st.integers(0, 2),
        name=st.sampled_from("abbc"),
        count=st.integers(1, 2),
    )
    def release_after_deploying(self, number: int, which: int, name: str, count: int) -> None:
        self.deploy(number, which)
        self.send(name, KEYS[0], count)
        self.goes(number)

    @precondition(lambda self: len(self.processes) > 1)
    @rule(number=PROCESSES)
    def leave(self, number: int) -> None:
        if number in self.processes:
            self.processes.pop(number).leave()

    @rule(
        what=st.sampled_from(
            [
                ("a", "account", "3/m"),
                ("a", "account", None),
                ("b", "b#0", "1/m"),
                ("b", "b#0", None),
            ]
        )
    )
    def change(self, what: tuple[str, str, str | None]) -> None:
        name, limit, rate = what
        known = {
            b.id for process in self.processes.values() for b in process.book.budgets.get(name, ())
        }
        if limit not in known:
            return
        settings.set_rate("default", limit, rate)
        self.rates = {k: v for k, v in {**self.rates, limit: rate}.items() if v is not None}

    # What happens to calls.

    @rule(name=st.sampled_from("abc"), key=st.sampled_from(KEYS), count=st.integers(1, 4))
    def send(self, name: str, key: dict[str, str], count: int) -> None:
        data = {"method": "get", "params": {"url": "http://vendor.example/"}}
        with patch.object(conf, "current", lambda: Settings):
            CallQueue.objects.send_many([data] * count, rule=name, key=key)

    @rule(number=PROCESSES)
    def goes(self, number: int) -> None:
        if number not in self.processes:
            return
        before = set(CallAttempt.objects.values_list("pk", flat=True))
        self.processes[number].goes()
        new = [
            attempt for attempt in CallAttempt.objects.order_by("pk") if attempt.pk not in before
        ]
        for attempt in new:
            self.charged[attempt.pk] = {
                b.id for process in self.alive() for b in process.book.budgets.get(attempt.rule, ())
            }
        if new:
            self.judge(new)

    @rule(count=st.integers(1, 3))
    def answer(self, count: int) -> None:
        now = database.clock("default")
        pks = list(CallAttempt.objects.open().order_by("pk").values_list("pk", flat=True)[:count])
        CallAttempt.objects.filter(pk__in=pks).update(
            started_at=now, sent_at=now, finished_at=now, outcome="succeeded"
        )

    @rule(count=st.integers(1, 2))
    def undo(self, count: int) -> None:
        with patch.object(conf, "current", lambda: Settings):
            transitions.undo(
                "default",
                list(
                    CallAttempt.objects.unbegun()
                    .order_by("-pk")
                    .values_list("pk", flat=True)[:count]
                ),
            )

    @rule(seconds=st.sampled_from([1.0, 10.0, 45.0, 58.0, 61.0, 300.0, 700.0]))
    def pass_time(self, seconds: float) -> None:
        self.later += seconds
        server_clock.ahead = timedelta(seconds=self.later)
        now = database.clock("default")  # they give signs of life
        DispenserState.objects.update(seen_at=now)
        OpinionState.objects.update(seen_at=now)

    # The adversary.

    def alive(self) -> Iterable[Process]:
        return self.processes.values()

    def judge(self, new: list[CallAttempt]) -> None:
        attempts = [a for a in CallAttempt.objects.charged() if a.pk in self.charged]
        at = max(database.to_us(a.send_at or a.released_at) for a in new)
        for process in self.alive():
            for budget in process.book.all_budgets():
                limit = budget.limit
                rate = self.rates.get(budget.id)
                if rate is not None and not isinstance(limit, Concurrency):
                    limit = limit.with_rate(rate)
                mine = [a for a in attempts if budget.id in self.charged[a.pk]]
                concerned = {value_of(limit, a) for a in new if budget.id in self.charged[a.pk]}
                used = Counter(value_of(limit, a) for a in mine if counts(limit, a, at))
                for value in concerned:
                    assert used[value] <= limit.capacity, (
                        process.name,
                        budget.id,
                        limit,
                        value,
                        used,
                    )


def value_of(limit: Limit, attempt: CallAttempt) -> str:
    return "" if limit.per == "rule" else key_part(attempt.key, limit.per)


def counts(limit: Limit, attempt: CallAttempt, at: int) -> bool:
    """Whether the provider may count the attempt together with one that is sent at this instant."""
    if attempt.finished_at is None:
        return True
    ended = database.to_us(attempt.finished_at)
    if isinstance(limit, Concurrency):
        return False
    if isinstance(
        limit, TokenBucket
    ):  # at once: what was taken less than a token's time ago cannot have come back
        return ended > at - limit.period_us // limit.n
    if isinstance(limit, FixedWindow):
        return ended >= limit.window(at)[0]
    return ended >= at - limit.window_us


class _Settings:
    """What workers and web processes have: every rule, and limits that are tallied."""

    def __getattr__(self, name: str) -> object:
        return getattr(real_current(), name)

    book = bind(
        {
            "a": Rule(limits=[KEYED, NAMED, OWN]),
            "b": Rule(limits=[KEYED, NAMED, OWN]),
            "c": Rule(limits=[KEYED, NAMED, OWN]),
        }
    )

    @property
    def rules(self) -> dict[str, Rule]:
        return dict(self.book.rules)

    def rule(self, name: str) -> Rule:
        return self.book.rules[name]


real_current = conf.current
Settings = _Settings()


@pytest.mark.django_db(transaction=True)
@pytest.mark.fault
def test_whatever_the_history_no_window_is_over() -> None:
    health = list(HealthCheck)
    chosen = chosen_settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=health,
    )
    run_state_machine_as_test(Histories, settings=chosen)
