"""The page of a rule: where it stands, its limits, what fails, its keys, what it sent, how it drains;
and what is done to it: pause, resume, changed limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from callqueue import Concurrency, Rule, SlidingWindow, control
from callqueue.admin.rule_actions import rule_url
from callqueue.dispatch.dispenser import hold_everything
from callqueue.history import errors, sums
from callqueue.history.sums import DAY_S
from callqueue.ledger import ledger_time
from callqueue.look import look
from callqueue.models import CallAttempt, CallQueue, DispenserState, Hold, SettingsState
from tests.db.admin.staff import (
    CHANGELIST,
    DASHBOARD,
    act,
    answer,
    ended,
    log_in,
    page_of,
    text_of,
    wait,
)
from tests.support.behaviour import move_ledger, send

Rules = Callable[..., None]
Status = CallQueue.Status


def page(client: Client, name: str, **query: str) -> Any:
    return client.get(reverse("admin:callqueue_rule"), {"name": name, **query})


def requeue_all(client: Client, group: str, **more: str) -> Any:
    """Press the button of a group."""
    fields = {"action": "requeue_calls", "_selected_action": "0", "select_across": "1", **more}
    address = f"{reverse(CHANGELIST)}?rule__exact=pay"
    return client.post(address, {**fields, "group": group}, follow=True)


def answered(rule: str, count: int, seconds: float = 30, outcome: str = "succeeded") -> None:
    """So many attempts a tenth of a second apart, the last of them so many seconds ago."""
    for i in range(count):
        at = ledger_time.now("default") - timedelta(seconds=seconds + i / 10)
        call = CallQueue.objects.create(
            rule=rule, status=Status.DONE, last_attempt=1, call_data={},
            due_at_dt=ledger_time.to_wall("default", at) - timedelta(seconds=2),
        )  # fmt: skip
        CallAttempt.objects.create(
            call=call, number=1, rule=rule, released_at=at, started_at=at, sent_at=at,
            finished_at=at + timedelta(milliseconds=50), outcome=outcome,
        )  # fmt: skip


def add_up() -> None:
    while sums.add_up("default"):
        pass


@pytest.mark.parametrize("set_by", [0, 40, -40])
def test_what_it_sent_is_told_by_days_and_lately(rules: Rules, root: Client, set_by: int) -> None:
    """By the wall's days, though the clock was set by some since."""
    move_ledger(set_by * DAY_S)
    rules(pay=Rule())
    answered("pay", 17)
    answered("pay", 3, 1000, "throttled")
    add_up()
    shown = page(root, "pay")
    told = dict(shown.context["sums"])
    assert set(told) == {"Today", "Yesterday", "Last hour", "Last 24 hours"}
    assert told["Last hour"] == told["Last 24 hours"] == ["20", "17", "0", "3"]
    both = zip(told["Today"], told["Yesterday"], strict=True)
    assert [int(one) + int(other) for one, other in both] == [20, 17, 0, 3]
    assert shown.context["waits"] == "at most 2.5 s"
    assert shown.context["answers"] == "at most 50 ms"


def test_the_last_day_is_drawn_and_written(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("20/s")]))
    answered("pay", 3)
    answered("pay", 2, outcome="throttled")
    add_up()
    shown = page(root, "pay").context
    for kind, height in (("done", 58.8), ("throttled", 39.2)):
        assert re.search(rf'<rect class="cq-{kind}" [^>]*height="{height}"', shown["chart"])
    ((_, numbers),) = shown["chart_rows"]
    assert numbers == ["5", "3", "0", "2"]


def test_a_limit_that_calls_in_flight_use_up_says_so(rules: Rules, root: Client) -> None:
    rules(llm=Rule(limits=[Concurrency(2)]))
    answered("llm", 3)
    wait("llm")
    for number in (1, 2):
        CallAttempt.objects.create(
            call_id=number, number=1, rule="llm", released_at=ledger_time.now("default")
        )
        (limit,) = page(root, "llm").context["limits"]
        assert bool(limit["note"]) == bool(limit["opens"]) == (number == 2)
    why = "used up by 2 calls in flight, which take "
    assert limit["note"].startswith(why)
    assert limit["opens"] == "with an answer"
    CallAttempt.objects.open().update(started_at=ledger_time.now("default"))
    told = CallQueue.objects.waiting().get().forecast()
    assert why in told.reason
    assert told.release_at is not None


def test_where_no_call_has_been_answered_yet_that_is_why_nobody_knows(
    rules: Rules, root: Client
) -> None:
    rules(llm=Rule(limits=[Concurrency(2)]))
    for _ in range(5):
        wait("llm")
    now = ledger_time.now("default")
    DispenserState.objects.create(name="a:1", digest="settings", started_at=now, seen_at=now)
    ends = page(root, "llm").context["ends"]
    assert ends == "no estimate: how fast calls are answered is not known yet"


def test_it_says_what_is_wrong_and_nothing_of_other_rules(rules: Rules, root: Client) -> None:
    rules(pay=Rule(), other=Rule())
    wait("pay")
    wait("other")
    now = ledger_time.now("default")
    DispenserState.objects.create(
        name="a:1", digest="settings", started_at=now, seen_at=now - timedelta(minutes=5)
    )
    control.pause("default", "pay", reason="maintenance")
    control.pause("default", "other", reason="why of another")
    shown = page(root, "pay")
    assert [str(state) for state, _ in shown.context["states"]] == ["no dispenser", "held"]
    assert shown.context["notes"][0].text.startswith("No dispenser runs")
    assert "other" not in " ".join(one.text for one in shown.context["notes"])
    assert shown.context["ends"] == "no estimate: no dispenser runs"


def test_a_name_may_be_anything(rules: Rules, root: Client) -> None:
    name = "a/b & <c>?x=1"
    rules(**{name: Rule()})
    shown = page(root, name)
    assert shown.status_code == 200
    assert "<c>" not in text_of(shown)
    assert page(root, "nope").status_code == 404
    assert page(root, "")["Location"] == reverse(DASHBOARD)


def test_keys_are_counted_exactly_and_held_ones_marked_however_many(
    rules: Rules, root: Client
) -> None:
    rules(chat=Rule(limits=[SlidingWindow("1/s", per="key")]), held=Rule())
    keys = ["hog"] * 30 + ["b"] * 3 + [f"k{i}" for i in range(27)]
    names = [f"k{n:02d}" for n in range(12)]
    CallQueue.objects.bulk_create(
        CallQueue(rule=rule, key=key, ready=True, call_data={})
        for rule, some in (("chat", keys), ("held", [*names, "free"]))
        for key in some
    )
    shown = page(root, "chat")
    assert shown.context["keys"][:2] == [("hog", "30", "50 %", False), ("b", "3", "5 %", False)]
    assert shown.context["keys_count"] == "29"
    assert "in 30 seconds" in shown.context["ends"]
    Hold.objects.bulk_create([Hold(rule="held", per="key", value=name) for name in names])
    marked = {key: is_held for key, _, _, is_held in page(root, "held").context["keys"]}
    assert marked == {"free": False} | dict.fromkeys(names, True)


def test_a_key_is_marked_as_held_by_a_hold_on_one_of_its_names(rules: Rules, root: Client) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m", per="channel")]))
    of_c9 = ['{"channel":"C9"}', '{"channel":"C9","of":"T1"}']
    CallQueue.objects.bulk_create(
        CallQueue(rule="r", key=key, ready=True, call_data={})
        for key in (*of_c9, '{"channel":"C8","of":"C9"}', "C9")
    )
    Hold.objects.create(rule="r", per="channel", value="C9")
    marked = {key: is_held for key, _, _, is_held in page(root, "r").context["keys"]}
    assert {key for key, is_held in marked.items() if is_held} == set(of_c9)
    assert len(marked) == 4
    assert look("default").rule("r").kept_calls == 2


def test_a_group_of_thousands_is_requeued_as_one(rules: Rules, root: Client) -> None:
    """Django refuses a form of more than a thousand fields."""
    rules(pay=Rule())
    made = [
        CallQueue(
            rule="pay", status=Status.FAILED, call_data={}, method="get", error_message="no",
            ready=False, finished_at_dt=timezone.now(),
        )
        for _ in range(1100)
    ]  # fmt: skip
    CallQueue.objects.bulk_create(made)
    (group,) = page(root, "pay").context["groups"]
    asked = requeue_all(root, group["name"])
    assert "1100 calls requeued" in text_of(answer(root, asked))


def test_no_more_groups_are_listed_than_can_be_read(rules: Rules, root: Client) -> None:
    """The largest; the others are counted, and can be requeued by their names all the same."""
    rules(pay=Rule())
    words = [f"the {one}{other}" for one in "ghijklmn" for other in "ghijklmn"]
    for place, word in enumerate(words):
        for _ in range(2 if place > 10 else 1):
            ended(Status.FAILED, rule="pay", error_message=f"302 to {word}.example")
    shown = page(root, "pay")
    assert [group["count"] for group in shown.context["groups"]] == ["2"] * errors.MOST
    others = len(words) - errors.MOST
    assert f"and {others} other reasons ({2 * others - 11} calls)" in text_of(shown)
    last = errors.read_groups("default", "pay")[0][-1]
    assert "Requeue 1 call" in text_of(requeue_all(root, last.digest))
    assert "None of these calls" in text_of(requeue_all(root, "of nobody"))


HOSTILE = {
    "letters and dashes": lambda n: f"{n:04x}" + "a-" * 1000,
    "dashes and blanks": lambda n: f"{n:04x}" + "a------ " * 250,
    "a host of its own": lambda n: f"HTTP 302 to http://w{n}x.example/",
    "two thousand characters": lambda n: " ".join(f"{chr(103 + n % 19)}{n}w{i}" for i in range(300))[:2000],
    "digits without an end": lambda n: f"w{n}" + "1" * 1990 + "x",
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_page_costs_no_more_than_so_much_whatever_providers_say(
    rules: Rules, root: Client, kind: str
) -> None:
    """In characters that are looked at and sent, in place of seconds, which tell more of the
    machine.
    """
    rules(pay=Rule())
    CallQueue.objects.bulk_create(
        [
            CallQueue(
                rule="pay", status=Status.FAILED, call_data={}, error_message=HOSTILE[kind](n)
            )
            for n in range(400)
        ]
    )
    looked: list[int] = []

    class Counting:
        def sub(self, own: Any, text: str) -> str:
            looked.append(len(text))
            return str(real.sub(own, text))

    with pytest.MonkeyPatch.context() as patch:
        real = errors._OWN
        patch.setattr(errors, "_OWN", Counting())
        shown = page(root, "pay")
    assert len(shown.context["groups"]) <= 50
    assert max(looked) <= 2000
    assert sum(looked) <= 400 * 300 + 50 * 2000
    assert len(shown.content) < 250_000


def test_what_differs_from_call_to_call_is_left_out() -> None:
    alike = {
        "id 0123abcd-ef failed after 1.25 s for 12345": "id … failed after … s for …",
        "a deadbeef of the letters, and 12 of 404": "a deadbeef of the letters, and 12 of 404",
        "HTTP 422 from 127.0.0.1: 0.25 s": "HTTP 422 from 127.0.0.1: … s",
        "x" * 5000: "x" * errors.COMPARED,
    }
    assert {text: errors.text_in_common(text) for text in alike} == alike


def test_a_secret_is_redacted_before_its_text_is_cut(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    padding = "x" * (errors.COMPARED - 20)
    ended(Status.FAILED, rule="pay", error_message=f"{padding} password=h1dd3n-{'y' * 400}")
    (group,) = page(root, "pay").context["groups"]
    assert "h1dd3n" not in group["text"]


def test_what_if_is_worked_out_from_the_real_backlog(rules: Rules) -> None:
    """By all who may look; what changes it is for those who may."""
    rules(pay=Rule(limits=[SlidingWindow("1/s")]))
    wait("pay", 600)
    looks, controls = log_in("view_callqueue"), log_in("view_callqueue", "control_rule")
    assert "in 10 minutes" in page(looks, "pay").context["ends"]
    (pay,) = page(looks, "pay", limit="pay#0", rate="2/s").context["rules"]
    assert (pay["before"], pay["after"]) == ("10 minutes", "5 minutes")
    ended(Status.FAILED, rule="pay", error_message="no")
    for client, may in ((looks, False), (controls, True)):
        shown = text_of(page(client, "pay", limit="pay#0", rate="2/s"))
        assert ("Yes, change it" in shown) is may
        assert "Requeue all" not in text_of(page(client, "pay"))


def test_a_backlog_that_drains_more_slowly_is_not_said_to_grow(rules: Rules, root: Client) -> None:
    """Nothing comes in; more is answered than the new rate would let through."""
    rules(pay=Rule(limits=[SlidingWindow("5/s")]))
    wait("pay", 600)
    answered("pay", 100, seconds=1)
    shown = page(root, "pay", limit="pay#0", rate="1/s").context
    assert [(one["in"], one["out"]) for one in shown["rules"]] == [("0", "1.7")]
    assert shown["too_low"] == ""


def test_a_what_if_that_makes_no_sense_says_why(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("1/s")]))
    for rate, limit in (("many", "pay#0"), ("5/s", "nope"), ("5/s", "")):
        wrong = {"name": "pay", "rate": rate, "limit": limit}
        shown = root.get(reverse("admin:callqueue_rule"), wrong, follow=True)
        (said,) = [str(one) for one in shown.context["messages"]]
        assert said.startswith("Nothing was changed: ")
        assert len(said) < 200


NONSENSE: list[dict[str, str]] = [
    {"do": "pause", "rule": "nope"},
    {"do": "pause", "rule": "pay", "for": "soon"},
    {"do": "pause", "rule": "pay", "for": "soon", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "0m", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "how": "for", "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "10m", "key": "x" * 256, "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "10m", "key": '{"a":' * 3000, "confirm": "yes"},
    {"do": "pause", "rule": "pay", "for": "10m", "key": '{"a":{"b":1}}', "confirm": "yes"},
    {"do": "resume", "rule": "nope"},
    {"do": "resume", "rule": "pay", "key": '{"a":' * 3000},
    {"do": "limit", "rule": "pay", "limit": "nope", "rate": "5/s"},
    {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s"},
    {"do": "limit", "rule": "pay", "limit": "pay#0", "rate": "ten/s", "confirm": "yes"},
    {"do": "limit", "rule": "nope", "limit": "pay#0", "rate": "5/s"},
    {"do": "explode", "rule": "pay"},
    {},
]


def test_what_makes_no_sense_changes_nothing_and_says_why(rules: Rules, root: Client) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]))
    for fields in NONSENSE:
        assert re.search("Nothing was (changed|done)", act(root, **fields)), fields
    assert not Hold.objects.exists()
    assert not SettingsState.objects.exclude(rates={}).exists()
    assert not LogEntry.objects.exists()


def test_what_was_typed_is_kept_after_a_bad_duration(rules: Rules, root: Client) -> None:
    rules(pay=Rule())
    typed = {"how": "for", "for": "ten", "key": 'k"1', "reason": "they <asked>"}
    shown = act(root, do="pause", rule="pay", **typed, confirm="yes")
    assert "is not a duration" in shown
    for name, value in {**typed, "key": "k&quot;1", "reason": "they &lt;asked&gt;"}.items():
        assert name == "how" or f'name="{name}"' in shown
        assert f'value="{value}"' in shown


def test_the_hold_after_a_restored_backup_is_ended_on_purpose(rules: Rules, root: Client) -> None:
    rules(pay=Rule(), default=Rule())
    page = rule_url("pay")
    act(root, do="pause", rule="pay", how="resumed", confirm="yes")
    assert 'name="restored"' not in text_of(root.get(page))
    hold_everything("default")
    assert 'name="restored"' in text_of(root.get(page))
    assert "1 hold ended. It is still held after a restored backup, until 2" in act(
        root, do="resume", rule="pay", confirm="yes"
    )
    assert Hold.objects.get(rule="pay").source == "restored"
    restored = {"do": "resume", "rule": "pay", "restored": "yes"}
    assert 'name="restored"' in act(root, **restored)
    assert "Resumed; 1 hold ended." in act(root, **restored, confirm="yes")
    assert not Hold.objects.filter(rule="pay").exists()


def test_why_something_is_held_and_which_keys_are_is_told_to_those_who_may_see_holds(
    rules: Rules,
) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h", per="key")]))
    call, other = send("pay", key="tenant-1"), send("pay")
    Hold.objects.create(rule="pay", reason="why-of-rule", source="operator")
    Hold.objects.create(rule="pay", per="key", value="tenant-1", reason="why-of-key")
    soon = ledger_time.now("default") + timedelta(hours=1)
    Hold.objects.create(rule="pay", per="key", value="tenant-gone", reason="why-gone", until=soon)
    root = log_in("view_callqueue", "view_hold", "control_rule")
    pause = {"do": "pause", "rule": "pay", "how": "resumed", "confirm": "y"}
    act(root, **pause, key="tenant-2", reason="why-of-form")
    pages = [page_of(call), page_of(other), reverse(DASHBOARD), rule_url("pay")]
    told = "".join(text_of(root.get(page)) for page in pages)
    keys, by = {"tenant-gone", "tenant-2"}, "by an operator"
    for hidden in {"why-of-rule", "why-of-key", "why-gone", "why-of-form", by, *keys}:
        assert hidden in told
    viewer = log_in("view_callqueue", "control_rule")
    told = "".join(text_of(viewer.get(page)) for page in pages)
    assert "until it is resumed" in told, "that a rule is held is no secret"
    assert not [hidden for hidden in {"why-", by, *keys} if hidden in told]
    assert "1 rule held (pay, 2 waiting)." in told
    history = "What was done"
    assert history in text_of(root.get(rule_url("pay")))
    assert history not in text_of(viewer.get(rule_url("pay")))
