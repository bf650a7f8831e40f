"""Asks what an operator asks, at every door where an answer is had: the commands, the admin's pages
as text, the metrics and the forecast. Knows nothing of how the answers come about.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.urls import reverse
from prometheus_client.parser import text_string_to_metric_families

from callqueue import metrics
from callqueue.dispatch.dispenser import Dispenser
from callqueue.execution import executor
from callqueue.models import CallQueue
from callqueue.testing import Clock, run_callqueue, travel
from tests.db import commands

Rules = Callable[..., None]
CALL = {"method": "get", "params": {"url": "http://vendor.example/"}}
CLOCK_TIME = re.compile(r"(?:(\d{4}-\d\d-\d\d) )?(\d\d):(\d\d)(?::(\d\d))?")


def send(rule: str, count: int = 1, **options: Any) -> list[CallQueue]:
    """So many calls of a rule."""
    return CallQueue.objects.send_many([CALL] * count, rule=rule, **options)


def waiting(rule: str) -> list[CallQueue]:
    """Its calls that wait, in the order in which they were sent."""
    return list(CallQueue.objects.waiting().filter(rule=rule).order_by("pk"))


def dispenser(name: str = "egress-1:21221:ab", **options: Any) -> Dispenser:
    """A dispenser that runs from now on, and whose calls no worker takes; it has made a round."""
    running = Dispenser(name=name, publish=lambda *_: True, **options)
    running.run_once()
    return running


def every(clock: Clock, seconds: float, times: int) -> Iterator[int]:
    """So many turns, so far apart by the clock, however long each takes."""
    began = clock.now()
    for turn in range(times):
        yield turn
        clock.to(began + timedelta(seconds=seconds * (turn + 1)))


class SlowWorker:
    """A dispenser whose released calls wait for one worker, which makes them one by one."""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def _take(self, using: str, messages: Any) -> bool:
        self._taken += [pk for _, ids in messages for pk in ids]
        return True

    def make_one(self) -> None:
        """Release what may go, and make the first call that was."""
        Dispenser(name="egress-1:21221:ab", publish=self._take).run_once()
        executor.execute("default", [self._taken.pop(0)])


def plain(text: str) -> str:
    """A page, or a part of one, as it is read."""
    text = re.sub(r"(?s)<(script|style|template).*?</\1>", " ", text)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text))).strip()


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, as they are read."""
    return [
        [
            [plain(cell) for cell in re.findall(r"(?s)<t[hd]\b[^>]*>(.*?)</t[hd]>", row)]
            for row in re.findall(r"(?s)<tr\b[^>]*>(.*?)</tr>", table)
        ]
        for table in re.findall(r"(?s)<table\b.*?</table>", page)
    ]


def number(text: str) -> int:
    """The first number of a text."""
    found = re.search(r"\d[\d,]*", text)
    assert found, text
    return int(found[0].replace(",", ""))


class Ask:
    """Somebody who may see and do everything, and asks."""

    def __init__(self) -> None:
        user = User.objects.create_user("ada", password="x", is_staff=True, is_superuser=True)
        self.client = Client()
        self.client.force_login(user)

    # --- the doors

    def status(self, rule: str) -> dict[str, Any]:
        """What `callqueue_status --json` says of a rule."""
        found: dict[str, Any] = commands.run("status", "--json").document["rules"][rule]
        return found

    def status_text(self) -> str:
        return commands.run("status").out

    def doctor(self, check: str) -> dict[str, Any]:
        """A check of `callqueue_doctor --json`."""
        checks = commands.run("doctor", "--json").document["checks"]
        found: dict[str, Any] = next(one for one in checks if one["name"] == check)
        return found

    def metrics(self, name: str, *labels: str) -> float | None:
        """A sample, by the values of its labels in the order of their names."""
        answer = metrics.view(RequestFactory().get("/metrics")).content.decode()
        for family in text_string_to_metric_families(answer):
            for one in family.samples:
                values = tuple(value for _, value in sorted(one.labels.items()))
                if (one.name, *values) == (name, *labels):
                    return float(one.value)
        return None

    def page(self, view: str, /, *args: Any, **query: Any) -> str:
        """A page of the admin, as HTML."""
        answer = self.client.get(reverse(f"admin:callqueue_{view}", args=args), query)
        assert answer.status_code == 200, answer
        return str(answer.content.decode())

    def dashboard(self) -> str:
        return plain(self.page("dashboard"))

    def row(self, rule: str) -> dict[str, str]:
        """The rule's row of the dashboard, by heading."""
        for heading, *rows in tables(self.page("dashboard")):
            for cells in rows:
                if cells[:1] == [rule]:
                    return dict(zip(heading, cells, strict=True))
        raise KeyError(rule)

    def rule(self, rule: str) -> str:
        """The rule's page, as it is read."""
        return plain(self.page("rule", name=rule))

    def rule_tables(self, rule: str) -> list[list[str]]:
        """All rows of the tables of the rule's page."""
        return [row for table in tables(self.page("rule", name=rule)) for row in table]

    def call(self, call: CallQueue) -> str:
        """The call's page, as it is read."""
        return plain(self.page("callqueue_change", call.pk))

    def post(self, **fields: Any) -> str:
        """What a form of the dashboard or of a rule's page answers, as HTML."""
        answer = self.client.post(reverse("admin:callqueue_dashboard"), fields, follow=True)
        return str(answer.content.decode())

    # --- one question at all doors: when is the backlog of a rule gone

    def seconds(self, door: str, rule: str, now: datetime) -> float | None:
        """Seconds until the last call of a rule goes, as this door has it; None: nobody can say."""
        if door == "status":
            return self.status(rule)["drain_s"]
        if door == "metrics":
            return self.metrics("callqueue_drain_seconds", rule)
        if door == "dashboard":
            return until(self.row(rule)["Done by"], now)
        if door == "rule":
            said = self.rule(rule).partition("Done by")[2]
            return until(said[:30], now)
        last = waiting(rule)[-1]
        if door == "forecast":
            at = last.forecast().release_at
            return None if at is None else (at - now).total_seconds()
        if door == "status --call":
            said = commands.run("status", "--call", str(last.pk), "--json").document["release_at"]
            return said and (datetime.fromisoformat(said) - now).total_seconds()
        assert door == "call"
        return until(self.call(last).partition("It should go at")[2][:30], now)


DOORS = ("status", "metrics", "dashboard", "rule", "forecast", "status --call", "call")


def until(text: str, now: datetime) -> float | None:
    """Seconds until the clock time at which a text begins; None where it has none."""
    found = CLOCK_TIME.search(text)
    if found is None:
        return None
    day, hour, minute, second = found.groups()
    at = now.replace(hour=int(hour), minute=int(minute), second=int(second or 0), microsecond=0)
    if day:
        at = at.replace(
            **dict(zip(("year", "month", "day"), map(int, day.split("-")), strict=True))
        )
    return (at - now).total_seconds()


def run_all(rule: str) -> float:
    """Let the queue run until nothing of the rule waits; the seconds that took, by its clock."""
    with travel() as clock:
        began = clock.now()
        run_callqueue(max_passes=100_000, skip_waits=True)
        assert not waiting(rule)
        last = CallQueue.objects.filter(rule=rule).order_by("-dispatched_at_dt").first()
        assert last is not None
        return float((last.dispatched_at_dt - began) / timedelta(seconds=1))
