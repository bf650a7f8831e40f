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
from callqueue.models import CallQueue
from tests.db.admin.staff import CHANGELIST, DASHBOARD, ask, attempt, do, page_of, text_of
from tests.support.behaviour import release, send
from tests.support.catalogue import PO, entries

Rules = Callable[..., None]
RULE = "admin:callqueue_rule"


PAGES = {
    (DASHBOARD, ""): "Regel angehalten (r durch den Betrieb",
    (RULE, "?name=r"): "Was gescheitert ist",
    (RULE, "?name=r&limit=r%230&rate=5/s"): "Ein Limit von r ändern?",
    (RULE, "?name=r&audit=1"): "Angehalten",
    (CHANGELIST, ""): "Ausgewählte Aufrufe erneut einreihen",
}
FORMS = (
    {"do": "pause", "for": "soon"},
    {"do": "pause", "for": "10m"},
    {"do": "pause", "for": "10m", "confirm": "yes"},
    {"do": "pause", "how": "resumed", "confirm": "yes"},
    {"do": "resume"},
    {"do": "resume", "confirm": "yes"},
    {"do": "limit", "limit": "?"},
    {"do": "limit", "limit": "r#0", "rate": "1/m"},
)


@pytest.fixture
def german(db: None) -> Iterator[Client]:
    """A client that asks for German; the language that a request activated stays with the thread,
    and is put back.
    """
    client = Client(headers={"accept-language": "de"})
    client.force_login(User.objects.create_superuser("chefin", password="x"))
    yield client
    translation.deactivate()


def test_no_page_and_no_form_has_a_sentence_in_english(german: Client, rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/m")]))
    calls = made_in_every_state()
    control.pause("default", "r", reason="Wartung")
    for (name, query), words in PAGES.items():
        assert words.lower() in read(german.get(reverse(name) + query)).lower()
    for call in calls:
        text = read(german.get(page_of(call)))
        assert "Versuch 1" in text and "begonnen von w1" in text
    (failed,) = (call for call in calls if call.status == CallQueue.Status.FAILED)
    read(german.get(reverse("admin:callqueue_callqueue_edit", args=[failed.pk])))
    for action in ("requeue_calls", "cancel_calls"):
        assert "in jedem anderen Zustand" in read(ask(german, action, *calls))
        read(do(german, action, *calls))
    for fields in FORMS:
        text = read(german.post(reverse(DASHBOARD), {"rule": "r", **fields}, follow=True))
    assert "Ein Limit von r ändern?" in text
    german.defaults["HTTP_ACCEPT_LANGUAGE"] = "en"
    assert "Done by" in english_in(text_of(german.get(reverse(DASHBOARD)))), "it is found"


def test_the_forecast_of_a_call(german: Client, rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h")]))
    call = [send("r") for _ in range(3)][-1]
    release()
    text = read(german.get(page_of(call)))
    assert "SlidingWindow 1/h ist ausgeschöpft, und 1 Aufruf geht vor" in text


def made_in_every_state() -> list[CallQueue]:
    """One call in each state, with an attempt each."""
    for status in CallQueue.Status:
        call = send("r")
        CallQueue.objects.filter(pk=call.pk).update(
            status=status, ready=status == CallQueue.Status.NEW
        )
        attempt(call, queue="q", worker="w1", outcome="succeeded")
    return list(CallQueue.objects.all())


def read(response: Any) -> str:
    """The page, in which nothing is left in English."""
    assert response.status_code in (200, 400)
    text = text_of(response)
    assert english_in(text) == []
    return text


def english_in(text: str) -> list[str]:
    """The sentences of the source that a page shows as they are: those of two words and more, whose
    translation differs.
    """
    shown = html.unescape(re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL))
    found = []
    for message, translations, _ in entries(PO[0]):
        parts = [part.strip() for part in re.split(r"%\(\w+\)[sdr]|%[sdr]|<[^>]+>", message.text)]
        found += [
            part
            for part in parts
            if len(part.split()) > 1
            and part in shown
            and not any(part in other for other in translations)
        ]
    return found
