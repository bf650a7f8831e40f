"""Pausing and resuming rules and keys; requeueing and cancelling by the thousand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from unittest.mock import Mock, call

import pytest
from django.utils import timezone

from callqueue import Rule, SlidingWindow, control, states
from callqueue.control import bulk
from callqueue.dispatch.dispenser import hold_everything
from callqueue.exceptions import InvalidCall
from callqueue.ledger import holds, ledger_time
from callqueue.models import CallQueue, Hold
from callqueue.sending.validation import check_key
from tests.db.commands import run
from tests.support.behaviour import release, send
from tests.support.history import ended, failing, statuses

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.fixture(autouse=True)
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s", per="key")]), other=Rule())


def test_a_paused_rule_releases_nothing_until_it_is_resumed() -> None:
    sent = send("r")
    assert run("pause", "r", "--reason", "they asked us to").out == "paused r until it is resumed\n"
    hold = Hold.objects.get()
    assert (hold.rule, hold.per, hold.until, hold.reason) == ("r", "rule", None, "they asked us to")
    assert release() == []
    assert run("resume", "r").out == "resumed r: 1 hold ended\n"
    assert release() == [sent]


def test_one_key_is_paused_and_the_others_go_on() -> None:
    held, free = send("r", key="a"), send("r", key="b")
    assert run("pause", "r", "--key", "a").out == "paused r, key a until it is resumed\n"
    assert release() == [free]
    assert run("resume", "r", "--key", "b").out == "r, key b was not held\n"
    assert run("resume", "r", "--key", "a").code == 0
    assert release() == [held]


@pytest.mark.parametrize("name", ["key", "channel"])
def test_a_key_of_several_names_is_paused_as_a_whole(name: str) -> None:
    """Though a limit that is `per="key"` goes by its part of that name alone."""
    held, free = send("r", key={name: "A", "part": "X"}), send("r", key={name: "A", "part": "Y"})
    control.pause("default", "r", key={name: "A", "part": "X"})
    assert release() == [free]
    assert control.resume("default", "r", key={name: "A", "part": "Y"}) == 0
    assert control.resume("default", "r", key={name: "A", "part": "X"}) == 1
    assert release() == [held]


@pytest.mark.parametrize("name", ["workspace", "key", "rule"])
def test_a_key_of_one_name_is_paused_whatever_other_names_it_has(name: str) -> None:
    """An operator who paused a workspace was told that it was, and its calls went on."""
    held = send("r", key={name: "T1"})
    more = send("r", key={name: "T1", "channel": "C9"})
    free = [send("r", key={name: "T2", "channel": "C9"}), send("r", key="T2"), send("r")]
    told = CallQueue.objects.filter(control.condition_of_pause(check_key({name: "T1"})))
    assert set(told) == ({held} if name == "rule" else {held, more})
    assert run("pause", "r", "--key", f'{{"{name}": "T1"}}').code == 0
    no_limit_is_per_it = [more] if name == "rule" else []
    assert set(release()) == {*free, *no_limit_is_per_it}
    assert run("resume", "r", "--key", f'{{"{name}": "T1"}}').code == 0
    assert held in release()


@pytest.mark.parametrize(
    "paused",
    [
        "T1",
        {"key": "T1"},
        {"workspace": "T1"},
        {"workspace": 'a"b\\%_c'},
        {"n" * 101: "T1"},
        {"key": "T1", "a": "x"},
    ],
    ids=["plain", "named key", "name", "odd", "long", "several"],
)
def test_what_a_pause_is_told_to_hold_is_what_it_holds(paused: str | dict[str, str]) -> None:
    """Whatever the key's names and values have in them; by what is written large or small, too."""
    keys: list[str | dict[str, str]] = [
        paused, "T1", "t1", {"key": "T1"}, {"key": "t1", "a": "x"}, {"a": "x", "key": "T1"},
        {"workspace": "t1", "z": "x"}, {'x"workspace': "T1"}, {"z": "x", "workspace": "T1"},
        {"a": "x", "workspace": 'a"b\\%_c'}, {"workspace": 'A"b\\%_c', "z": "é"},
        {"workspace": 'a"b\\xyc', "z": "é"}, {"n" * 101: "T1", "a": "x"},
        {"a": '"workspace":"T1"'},
    ]  # fmt: skip
    sent = {send("r", key=key) for key in keys}
    told = set(CallQueue.objects.filter(control.condition_of_pause(check_key(paused))))
    control.pause("default", "r", key=paused)
    assert sent - set(release()) == told != set()


@pytest.mark.parametrize("key", [{"channel": "C9"}, {"workspace": "T1", "channel": "C9"}])
def test_a_key_is_resumed_from_what_a_provider_laid_on_one_of_its_names(
    key: dict[str, str],
) -> None:
    lasts = timedelta(minutes=5)
    holds.lay("default", ["r"], "channel", "C9", lasts, "Retry-After", source="provider")
    sent = send("r", key={"workspace": "T1", "channel": "C9"})
    assert release() == []
    assert control.resume("default", "r", key="C9") == 0
    assert control.resume("default", "r", key={"workspace": "C9", "channel": "C8"}) == 0
    assert control.resume("default", "r", key=key) == 1
    assert release() == [sent]


def test_a_pause_takes_the_place_of_an_earlier_one_may_be_shorter_and_ends_by_itself() -> None:
    run("pause", "r")
    ran = run("pause", "r", "--for", "10m", "--reason", "less")
    assert ran.out == "paused r for 10m\n"
    hold = Hold.objects.get()
    left = hold.until - ledger_time.now("default")
    assert timedelta(minutes=9) < left <= timedelta(minutes=10)
    assert hold.reason == "less"
    for length in ("0s", "0w", "-5m", "", "soon"):  # it would be over before it began
        refused = run("pause", "r", f"--for={length}")
        assert (refused.code, bool(refused.error)) == (2, True)
        assert Hold.objects.get().reason == "less"
    assert run("pause", "r").code == 0
    assert Hold.objects.get().until is None


def test_a_pause_leaves_the_providers_own_hold_as_it_is() -> None:
    holds.lay("default", ["r"], "rule", "", timedelta(minutes=5), "Retry-After", source="provider")
    control.pause("default", "r", seconds=600)
    control.pause("default", "r", seconds=5)
    left = {hold.source: hold.until - hold.began_at for hold in Hold.objects.all()}
    assert left["provider"] == timedelta(minutes=5)
    assert left["operator"] < timedelta(seconds=30)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_pause_of_seconds_that_make_none_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidCall, match="for: must be longer than 0 seconds"):
        control.pause("default", "r", seconds=seconds)


def test_the_hold_after_a_restored_backup_ends_by_its_own_name_only() -> None:
    """A pause, for less or without end, and a resume are about what somebody else laid."""
    run("pause", "other")
    hold_everything("default")
    safe = dict(Hold.objects.filter(source="restored").values_list("rule", "until"))
    assert set(safe) == {"r", "other", "default"}
    run("pause", "r", "--for", "1m")
    run("pause", "r", "--key", "k")
    run("pause", "other", "--for", "1m")
    for rule, count in (("r", "2 holds"), ("other", "1 hold")):
        resumed = run("resume", rule)
        assert (resumed.code, resumed.out) == (1, f"resumed {rule}: {count} ended\n")
        shown = ledger_time.to_wall("default", safe[rule])
        assert f"still held until {shown:%Y-%m-%d %H:%M:%S} UTC" in resumed.error
        assert f"callqueue_resume {rule} --restored" in resumed.error
        assert dict(Hold.objects.filter(rule=rule).values_list("source", "until")) == {
            "restored": safe[rule]
        }
        assert release() == []
    again = run("resume", "r")
    assert (again.code, again.out) == (1, "")
    sent = send("r")
    assert run("resume", "r", "--restored").out == "resumed r: 1 hold ended\n"
    assert release() == [sent]
    assert set(Hold.objects.values_list("rule", flat=True)) == {"default", "other"}


def test_a_backup_restored_twice_makes_the_hold_no_shorter() -> None:
    hold_everything("default")
    Hold.objects.update(until=ledger_time.now("default") + timedelta(days=9))
    hold_everything("default")
    left = min(Hold.objects.values_list("until", flat=True)) - ledger_time.now("default")
    assert left > timedelta(days=8)


def test_since_counts_from_the_end_and_for_an_error_from_its_last_failure() -> None:
    calls = (
        ended(Status.FAILED, 1),
        ended(Status.FAILED, 3),
        failing(1),
        failing(3),
        failing(1, states.VOIDED),
    )
    ran = run("requeue", "--status", "failed", "error", "--since", "2h")
    assert ran.out == "requeued 2 calls\n"
    assert statuses(*calls) == [Status.NEW, Status.FAILED, Status.NEW, Status.ERROR, Status.ERROR]


def test_cancel_by_age_counts_what_never_ended_from_its_creation() -> None:
    old, young = send("r"), send("r")
    CallQueue.objects.filter(pk=old.pk).update(created_dt=timezone.now() - timedelta(hours=5))
    run("cancel", "--since", "2h")
    assert statuses(old, young) == [Status.NEW, Status.CANCELLED]


def test_many_calls_go_in_batches_with_word_of_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 3)
    for _ in range(7):
        ended(Status.FAILED)
    progress = Mock()
    assert bulk.requeue("default", bulk.Pick((Status.FAILED,)), progress=progress) == 7
    assert progress.call_args_list == [call(3, 7), call(6, 7), call(7, 7)]


def test_a_hold_is_told_of_the_rules_that_were_free_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """A provider's is on all rules of a limit, of which one was resumed."""
    lasts = timedelta(minutes=5)
    holds.lay("default", ["r", "other"], "rule", "", lasts, "429", source="provider")
    control.resume("default", "r")
    caplog.clear()
    holds.lay("default", ["r", "other"], "rule", "", lasts, "429", source="provider")
    (told,) = caplog.messages
    assert told.startswith("rule_held rule=r ")


@pytest.mark.parametrize(
    ("source", "event"), [("operator", "rule_paused"), ("provider", "rule_held")]
)
def test_what_an_operator_held_is_told_as_a_pause(
    caplog: pytest.LogCaptureFixture, source: str, event: str
) -> None:
    with caplog.at_level("INFO", logger="callqueue"):
        holds.lay("default", ["r"], "rule", "", None, "why", source=source)
    assert [record.getMessage().split()[0] for record in caplog.records] == [event]
