"""The admin for someone whose browser asks for German: every page, and not a sentence in
English.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import translation

from callqueue import Rule, SlidingWindow, control
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import release, send
from tests.support.catalogue import PO, entries

Rules = Callable[..., None]
RULE = "admin:callqueue_rule"
OF_R = "?name=r"
CHANGELIST, DASHBOARD = "admin:callqueue_callqueue_changelist", "admin:callqueue_dashboard"


@pytest.fixture
def german(db: None) -> Iterator[Client]:
    """A client that asks for German; the language that a request activated stays with the thread,
    and is put back.
    """
    client = Client(headers={"accept-language": "de"})
    client.force_login(User.objects.create_superuser("chefin", password="x"))
    yield client
    translation.deactivate()


@pytest.fixture
def calls(rules: Rules) -> dict[int, CallQueue]:
    """One call in each state, with an attempt each; one rule, held."""
    rules(r=Rule(limits=[SlidingWindow("2/m")]))
    made = {status: send("r") for status in CallQueue.Status.values}
    for status, call in made.items():
        CallQueue.objects.filter(pk=call.pk).update(
            status=status, ready=status == CallQueue.Status.NEW
        )
        now = ledger_time.now("default")
        CallAttempt.objects.create(
            call=call, number=1, rule="r", queue="q", worker="w1", outcome="succeeded",
            released_at=now, started_at=now, sent_at=now, finished_at=now,
        )  # fmt: skip
    control.pause("default", "r", reason="Wartung")
    return {status: CallQueue.objects.get(pk=call.pk) for status, call in made.items()}


def english_in(text: str) -> list[str]:
    """The sentences of the source that a page shows as they are: those of two words and more, whose
    translation differs.
    """
    shown = html.unescape(re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL))
    found = []
    for message, translations, _ in entries(PO[0]):
        parts = [part.strip() for part in re.split(r"%\(\w+\)[sdr]|%[sdr]|<[^>]+>", message.text)]
        long = [
            part
            for part in parts
            if len(part.split()) > 1 and not any(part in other for other in translations)
        ]
        found += [part for part in long if part in shown]
    return found


def page(client: Client, name: str, *args: Any, query: str = "") -> str:
    answer = client.get(reverse(name, args=args) + query)
    assert answer.status_code == 200
    return str(answer.content.decode())


def test_english_would_be_found(german: Client, calls: dict[int, CallQueue]) -> None:
    german.defaults["HTTP_ACCEPT_LANGUAGE"] = "en"
    shown = english_in(page(german, DASHBOARD) + page(german, RULE, query=OF_R))
    assert {"In flight", "until it is resumed"} <= set(shown)


PAGES = {
    (DASHBOARD, ""): (
        "Übersicht", "Wartend", "Zu → ab", "Regel angehalten (r durch den Betrieb", "Fertig um",
    ),
    (RULE, OF_R): ("Angehalten", "bis zur Fortsetzung", "Was gescheitert ist"),
    (RULE, f"{OF_R}&limit=r%230&rate=5/s"): ("Ein Limit von r ändern?",),
    (RULE, f"{OF_R}&audit=1"): ("Angehalten",),
    (CHANGELIST, ""): (
        "Aufrufe", "ungewiss", "fehlgeschlagen", "Ausgewählte Aufrufe erneut einreihen",
        "letzter Fehler", "Fällig",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "query"), PAGES)
def test_a_page(german: Client, calls: dict[int, CallQueue], name: str, query: str) -> None:
    text = page(german, name, query=query)
    assert english_in(text) == []
    for word in PAGES[name, query]:
        assert word.lower() in text.lower()


def test_the_pages_of_calls_and_what_their_actions_ask_and_say(
    german: Client, calls: dict[int, CallQueue]
) -> None:
    for call in calls.values():
        text = page(german, "admin:callqueue_callqueue_change", call.pk)
        assert english_in(text) == []
        assert "Versuch 1" in text and "begonnen von w1" in text
    failed = calls[CallQueue.Status.FAILED]
    assert english_in(page(german, "admin:callqueue_callqueue_edit", failed.pk)) == []
    for action in ("requeue_calls", "cancel_calls"):
        chosen = {"action": action, "_selected_action": [call.pk for call in calls.values()]}
        asked, said = (
            german.post(reverse(CHANGELIST), {**chosen, **more}, follow=True).content.decode()
            for more in ({}, {"confirm": "all"})
        )
        assert english_in(asked) == english_in(said) == []
        assert "in jedem anderen Zustand" in asked


def test_pausing_and_changing_a_limit(german: Client, calls: dict[int, CallQueue]) -> None:
    for fields in (
        {"do": "pause", "for": "soon"},
        {"do": "pause", "for": "10m"},
        {"do": "pause", "for": "10m", "confirm": "yes"},
        {"do": "pause", "how": "resumed", "confirm": "yes"},
        {"do": "resume"},
        {"do": "limit", "limit": "?"},
        {"do": "limit", "limit": "r#0", "rate": "1/m"},
    ):
        fields = {"rule": "r", **fields}
        text = german.post(reverse(DASHBOARD), fields, follow=True).content.decode()
        assert english_in(text) == []
    assert "Ein Limit von r ändern?" in text


def test_the_forecast_of_a_call(german: Client, rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    call = [send("r") for _ in range(3)][-1]
    release()
    text = page(german, "admin:callqueue_callqueue_change", call.pk)
    assert english_in(text) == []
    assert "SlidingWindow 1/h ist ausgeschöpft, und 1 Aufruf geht vor" in text
