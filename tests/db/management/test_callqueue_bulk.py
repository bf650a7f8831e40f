"""callqueue_requeue and callqueue_cancel: which calls they pick, and what is wrong use."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from callqueue import Rule, SlidingWindow
from callqueue.models import CallQueue
from tests.db.commands import run
from tests.support.behaviour import send
from tests.support.history import ended, failing, statuses

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.fixture(autouse=True)
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s", per="key")]), other=Rule())


def test_requeue_takes_the_failed_ones_unless_told_which() -> None:
    calls = ended(Status.FAILED), ended(Status.UNKNOWN), ended(Status.CANCELLED), ended(Status.DONE)
    ran = run("requeue")
    assert (ran.code, ran.out) == (0, "requeued 1 call\n")
    assert statuses(*calls) == [Status.NEW, Status.UNKNOWN, Status.CANCELLED, Status.DONE]


def test_requeue_takes_several_statuses() -> None:
    calls = ended(Status.FAILED), ended(Status.UNKNOWN), ended(Status.EXPIRED), failing(1)
    assert (
        run("requeue", "--status", "failed", "unknown", "--status", "error").out
        == "requeued 3 calls\n"
    )
    assert statuses(*calls) == [Status.NEW, Status.NEW, Status.EXPIRED, Status.NEW]


def test_done_calls_are_made_again_only_where_that_is_said() -> None:
    call = ended(Status.DONE)
    refused = run("requeue", "--status", "done")
    assert refused.code == 2
    assert "--again" in refused.error
    assert statuses(call) == [Status.DONE]
    assert run("requeue", "--status", "done", "--again").out == "requeued 1 call\n"


def test_only_one_rule_and_one_key() -> None:
    calls = (
        ended(Status.FAILED, key="a"),
        ended(Status.FAILED, key="b"),
        ended(Status.FAILED, rule="other", key="a"),
    )
    run("requeue", "--rule", "r", "--key", "a")
    assert statuses(*calls) == [Status.NEW, Status.FAILED, Status.FAILED]


def test_a_key_of_several_names_is_json() -> None:
    call = ended(Status.FAILED, rule="other", key={"workspace": "T1", "channel": "C9"})
    assert (
        run("requeue", "--key", '{"workspace": "T1", "channel": "C9"}').out == "requeued 1 call\n"
    )
    assert statuses(call) == [Status.NEW]
    assert run("requeue", "--key", "{nonsense").code == 2


def test_a_dry_run_counts_and_changes_nothing() -> None:
    call = ended(Status.FAILED)
    assert run("requeue", "--dry-run").out == "would requeue 1 call; nothing was changed\n"
    assert statuses(call) == [Status.FAILED]
    waiting = send("r")
    assert run("cancel", "--dry-run").out == "would cancel 1 call; nothing was changed\n"
    assert statuses(waiting) == [Status.NEW]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("requeue", "--status", "faild"), "did you mean 'failed'"),
        (("requeue", "--status", "new"), "'new' is not possible here; choose from"),
        (("cancel", "--status", "done"), "'done' is not possible here; choose from"),
        (("requeue", "--rule", "othr"), "did you mean 'other'"),
        (("requeue", "--since", "2 hours"), "not a duration"),
        (("requeue", "--database", "nowhere"), "no 'nowhere' in DATABASES"),
        (("pause", "othr"), "did you mean 'other'"),
        (("pause", "r", "--for", "soon"), "not a duration"),
        (("resume", "othr"), "did you mean 'other'"),
    ],
)
def test_wrong_use_is_2_and_says_why(arguments: tuple[str, ...], why: str) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert why in ran.error


def test_cancel_wants_to_be_told_which_where_nobody_can_be_asked() -> None:
    call = send("r")
    for options in ((), ("--no-input",)):
        refused = run("cancel", *options)
        assert refused.code == 2
        assert "--all" in refused.error
    assert run("cancel", "--all", "--rule", "r").code == 2
    assert statuses(call) == [Status.NEW]
    assert run("cancel", "--all").out == "cancelled 1 call\n"


def test_cancel_without_options_asks_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    call = send("r")
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n" if "1 call" in question else "y")
    assert run("cancel").code == 1
    assert statuses(call) == [Status.NEW]
