"""callqueue_status: where every rule stands, for machines and for people."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from callqueue import Rule, SlidingWindow
from callqueue.management.commands import callqueue_status
from callqueue.models import CallQueue, DispenserState
from tests.db.commands import run
from tests.support.behaviour import release, send
from tests.support.history import ended

ROOT = Path(__file__).parents[3]
Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def a_backlog(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h", name="vendor")]), idle=Rule())
    for _ in range(5):
        send("r")
    release()


def test_json_has_the_figures_of_every_rule_and_people_get_a_table() -> None:
    ran = run("status", "--json")
    assert ran.code == 0
    rules = ran.document["rules"]
    assert set(rules) == {"r", "idle", "default"}
    keys = {"waiting", "in_flight", "oldest_due_s", "drain_s", "rate_per_s", "hold", "limits"}
    assert all(keys <= set(rule) for rule in rules.values())
    assert (rules["idle"]["state"], rules["idle"]["drain_s"]) == ("ok", 0.0)
    busy = rules["r"]
    assert (busy["waiting"], busy["in_flight"], busy["hold"]) == (3, 2, None)
    (limit,) = busy["limits"]
    assert (limit["name"], limit["per"], limit["rate"]) == ("vendor", "rule", "2/h")
    assert (limit["used"], limit["free"], limit["note"]) == (2, 0, "")
    lines = run("status").out.splitlines()
    heading = "rule waiting in flight a second oldest due drained held"
    assert " ".join(lines[0].split()) == heading
    line = next(line for line in lines if line.startswith("r "))
    assert line.split()[:3] == ["r", "3", "2"]
    assert "just now" in line
    assert "    vendor 2/h: 2 used, 0 free" in lines


def test_watching_goes_on_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []

    def sleep(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(callqueue_status.time, "sleep", sleep)
    ran = run("status", "--watch")
    assert ran.code == 0
    assert ran.out.count("    vendor 2/h: 2 used, 0 free") == 3


def test_one_call_says_why_it_waits_or_what_became_of_it() -> None:
    waits = CallQueue.objects.new().order_by("-pk").first()
    assert waits is not None
    said = run("status", "--call", str(waits.pk)).out
    assert said.startswith(f"call {waits.pk}, number 3 in its rule: ")
    assert run("status", "--call", str(waits.pk), "--json").document["position"] == 3
    call = ended(CallQueue.Status.FAILED)
    CallQueue.objects.filter(pk=call.pk).update(error_message="404 Not Found")
    said = run("status", "--call", str(call.pk)).out
    assert said.startswith(f"call {call.pk}: failed ")
    assert said.rstrip().endswith(": 404 Not Found")
    dispatched = CallQueue.objects.dispatched().first()
    assert dispatched is not None
    assert "goes" not in run("status", "--call", str(dispatched.pk)).out


def test_a_hold_on_a_key_is_shown_and_the_drain_time_knows_it(rules: Rules) -> None:
    rules(keyed=Rule(limits=[SlidingWindow("100/s", per="key")]))
    send("keyed", key="C9")
    run("pause", "keyed", "--key", "C9", "--for", "1h", "--reason", "they asked")
    rule = run("status", "--json").document["rules"]["keyed"]
    assert rule["hold"] is None
    (hold,) = rule["holds"]
    assert (hold["per"], hold["value"], hold["reason"]) == ("key", "C9", "they asked")
    assert 3000 < rule["drain_s"] < 4000
    line = next(line for line in run("status").out.splitlines() if line.startswith("keyed "))
    assert "key C9 until" in line
    assert "60 minutes" in line or "an hour" in line
    run("pause", "keyed", "--key", "C9")
    assert run("status", "--json").document["rules"]["keyed"]["drain_s"] is None
    CallQueue.objects.update(key="other")
    assert run("status", "--json").document["rules"]["keyed"]["drain_s"] < 5


def test_a_reader_that_leaves_is_no_fault_of_the_broker(tmp_path: Path) -> None:
    own = {"CALLQUEUE_TEST_DATABASE": "sqlite", "CALLQUEUE_TEST_DB_NAME": str(tmp_path / "db")}
    command = [sys.executable, "-m", "django", "callqueue_doctor", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **own}, stdout=writer, stderr=subprocess.PIPE,
            text=True, timeout=120,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_is_not_well_is_said_below_in_the_words_of_the_json() -> None:
    DispenserState.objects.all().delete()
    said = run("status").out.splitlines()
    told = run("status", "--json").document["notes"]
    wrong = [one["text"] for one in told if one["kind"] != "well"]
    assert any(text.startswith("No dispenser has been seen yet") for text in wrong)
    assert said[-len(wrong) :] == wrong
