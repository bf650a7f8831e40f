"""Holds and attempts can be looked at."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

from django.test import Client
from django.urls import reverse

from callqueue.ledger import ledger_time
from callqueue.models import Hold

Rules = Callable[..., None]


def test_holds_in_force_come_first_with_their_times(rules: Rules, root: Client) -> None:
    now = ledger_time.now("default")
    for name, until in (("over", -60), ("soon", 60), ("later", 3600), ("open", None)):
        ends = None if until is None else now + timedelta(seconds=until)
        Hold.objects.create(rule="pay", per="key", value=name, reason="why", until=ends)
    page = root.get(reverse("admin:callqueue_hold_changelist"))
    shown = re.findall(
        r'field-value">(\w+)</td><td class="field-state"><span class="[^"]*">([^<]*)</span>',
        page.content.decode(),
    )
    assert shown == [
        ("open", "in force"),
        ("later", "in force"),
        ("soon", "in force"),
        ("over", "over"),
    ]
    text = page.content.decode()
    assert "until it is resumed" in text
    shown_at = ledger_time.to_wall("default", now + timedelta(seconds=3600))
    assert f"{shown_at:%Y-%m-%d %H:%M:%S} UTC" in text
    assert "an operator" in text
    Hold.objects.create(rule="ship", reason="theirs", source=Hold.Source.PROVIDER)
    page = root.get(f"{reverse('admin:callqueue_hold_changelist')}?rule__exact=ship")
    assert ("theirs" in page.content.decode(), "why" in page.content.decode()) == (True, False)
