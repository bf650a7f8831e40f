"""Holds, rules and attempts can be looked at."""

from __future__ import annotations

from collections.abc import Callable

from django.test import Client
from django.urls import reverse

from callqueue.ledger import clock_jumps
from callqueue.models import Hold, RuleState
from tests.support.behaviour import release, send

Rules = Callable[..., None]


def test_the_row_of_the_clocks_jumps_is_no_rule(rules: Rules, root: Client) -> None:
    RuleState.objects.get_or_create(rule=clock_jumps.FRAME)
    response = root.get(reverse("admin:callqueue_rulestate_changelist"))
    assert response.status_code == 200
    assert clock_jumps.FRAME not in {state.rule for state in response.context["cl"].result_list}


def test_holds_rules_and_attempts_can_only_be_looked_at(rules: Rules, root: Client) -> None:
    call = send()
    release()
    hold = Hold.objects.create(rule="pay", reason="because")
    pages = [("hold", hold.pk), ("rulestate", "default"), ("callattempt", call.attempts.get().pk)]
    for model, pk in pages:
        assert root.get(reverse(f"admin:callqueue_{model}_changelist")).status_code == 200
        page = reverse(f"admin:callqueue_{model}_change", args=[pk])
        assert root.get(page).status_code == 200
        assert root.post(page, {}).status_code == 403
        assert root.get(reverse(f"admin:callqueue_{model}_add")).status_code == 302
        assert (
            root.post(
                reverse(f"admin:callqueue_{model}_delete", args=[pk]), {"post": "yes"}
            ).status_code
            == 403
        )
