"""Every address of the admin, for everyone who might come. What is added is found, and attacked too."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import transaction
from django.test import Client
from django.urls import reverse

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.admin.base import OwnAdmin
from callqueue.models import CallQueue
from tests.attacks.admin_site import (
    Scene,
    acts,
    addresses,
    admins,
    permissions,
    scene,
    someone,
    state,
    viewer,
)

Rules = Callable[..., None]
ADDRESSES = addresses()
HIDDEN = "h1dd3n-value"
NOT_THERE = ["0", "9" * 30, "x", "_00", "1 OR 1=1", "½", "_0A", "%s"]


@pytest.fixture
def there(rules: Rules) -> Scene:
    rules(default=Rule(limits=[SlidingWindow("100/h", per="key")]))
    return scene(text="t3xt", hidden=HIDDEN)


def forms(there: Scene) -> list[dict[str, Any]]:
    """What any form of the app might send, for each of the acts that share an address."""
    edited = {"method": "post", "params": {"url": "https://vendor.example/v2"}}
    common = {"_selected_action": [there.failed.pk, there.waiting.pk], "index": "0", "select_across": "1", "confirm": "all",
              "post": "yes", "page": "1", "rule": "default", "key": "", "limit": "default#0", "rate": "5/h",
              "call_data": json.dumps(edited), "status": "3", "reason": "because", "for": "10m"}  # fmt: skip
    acts = [("requeue_calls", "pause"), ("cancel_calls", "resume"), ("delete_selected", "limit")]
    return [{**common, "action": action, "do": do} for action, do in acts]


@contextmanager
def undone() -> Iterator[None]:
    """Whatever is done inside is rolled back."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def done_by(client: Client, there: Scene) -> set[str]:
    """What this client can do, by every form at every address."""
    found, before = set(), state()
    for path in there.paths(ADDRESSES):
        for form in forms(there):
            with undone():
                client.post(path, form)
                found |= acts(before, state())
    return found


# --- who may not


def test_who_is_not_logged_in_or_no_staff_is_sent_to_the_login(there: Scene) -> None:
    before = state()
    customer = someone(*permissions(), is_staff=False)
    for client in (Client(), customer):
        for path in there.paths(ADDRESSES):
            for method in ("get", "head", "post", "put", "patch", "delete", "options"):
                answer = getattr(client, method)(path)
                assert answer.status_code == 302, (method, path)
                assert answer["Location"].startswith("/admin/login/"), (method, path)
    assert state() == {**before, "users": state()["users"]}


def test_staff_without_permissions_see_and_change_nothing(there: Scene) -> None:
    nobody, before = someone(), state()
    for path in there.paths(ADDRESSES):
        for answer in (
            nobody.get(path, follow=True),
            nobody.post(path, forms(there)[0], follow=True),
        ):
            assert answer.status_code in (403, 404, 405), path
            for text in ("t3xt", HIDDEN, "vendor.example"):
                assert text not in answer.content.decode(), path
    assert state() == before


def test_nothing_is_done_by_get_nor_without_the_token(there: Scene) -> None:
    careful, root = Client(enforce_csrf_checks=True), someone(is_superuser=True)
    careful.cookies = root.cookies
    before, forged = state(), {"X-CSRFToken": "x" * 32, "Referer": "https://evil.example/"}
    for path in there.paths(ADDRESSES):
        for form in forms(there):
            assert careful.post(path, form).status_code in (403, 405), path
            assert careful.post(path, form, headers=forged).status_code != 200
            for method in (root.get, root.head, root.options):
                method(path, form)
    assert state() == before


# --- who may


WHAT_IS_ALLOWED = {
    "requeue_call": {"requeue"},
    "edit_call": {"edit"},
    "cancel_call": {"cancel"},
    "control_rule": {"control"},
    "delete_callqueue": {"delete"},
}


def test_each_permission_allows_what_it_names_and_nothing_else(there: Scene) -> None:
    """Each with `view_callqueue`, without which there is no page to act on."""
    others = [name for name in permissions() if name not in WHAT_IS_ALLOWED]
    assert done_by(someone(*others), there) == set()
    without_view = done_by(someone(*WHAT_IS_ALLOWED), there)
    assert without_view <= {"delete"}, "that is Django's own, which asks for no view permission"
    found = {name: done_by(someone("view_callqueue", name), there) for name in WHAT_IS_ALLOWED}
    assert found == WHAT_IS_ALLOWED


def test_what_is_done_is_written_down_and_no_page_shows_what_is_hidden(there: Scene) -> None:
    """To whoever may do everything; and what a POST changes leaves an entry that says who."""
    root, before, seen, shown = someone(is_superuser=True), state(), set[str](), 0
    for path in there.paths(ADDRESSES):
        for form in ({}, *forms(there)):
            with undone():
                text = root.get(path, follow=True).content.decode()
                text += root.post(path, form, follow=True).content.decode()
                done = acts(before, state())
                entry = LogEntry.objects.latest("pk")
            assert not done or entry.user_id == int(root.session["_auth_user_id"]), path
            assert HIDDEN not in text, path
            seen |= done
            shown += "[redacted]" in text
    assert seen == {"requeue", "edit", "cancel", "control", "delete"}
    assert shown


def test_whoever_may_do_everything_gets_no_error_by_asking_for_what_is_not_there(
    there: Scene,
) -> None:
    """Numbers that are none, that are too large, of other alphabets."""
    root = someone(is_superuser=True)
    for address in ADDRESSES:
        for pk in NOT_THERE if address.model else [""]:
            codes = [do(address.of(pk), follow=True).status_code for do in (root.get, root.post)]
            assert codes[0] in (200, 403, 404, 405), (address, pk)
            assert codes[1] in (200, 400, 403, 404, 405), (address, pk)
    assert CallQueue.objects.count() == 2


NONSENSE = [
    "p=-1", "p=99999999999999999999", "p=x", "o=-99.x", "o=9999999999999999999999", "all=1", "e=1", "_popup=1", "_facets=1",
    "_to_field=key", "q=%00", f"q={'x' * 3000}", "q='%22;--", "status__exact=99999999999999999999", "status__exact=%00",
    "rule__exact=%00", "ended=%00", "before=-1", "before=9999999999999999999999", "before=%00",
    "created_dt__gte=%00", "created_dt__year=99999",
    "name=%00", "=", "limit=default%230&rate=1e9/s", "rate=1/s", "audit=%00", "&&&", "%FF=%FF",
]  # fmt: skip


def test_nonsense_in_an_address_is_no_error_and_who_may_see_everything_changes_nothing(
    there: Scene,
) -> None:
    client, before = viewer(), state()
    for path in there.paths(ADDRESSES):
        for method in ("put", "patch", "delete"):
            getattr(client, method)(path)
        assert client.get(path, follow=True).status_code in (200, 403, 405), path
    assert state() == before
    for path in {address.of("") for address in ADDRESSES if not address.model}:
        for query in NONSENSE:
            asked = f"{path}&{query}" if "?" in path else f"{path}?{query}"
            assert client.get(asked, follow=True).status_code in (200, 400, 403, 404), asked


# --- lookups


JSON_LOOKUPS = ["params__headers__Authorization__startswith", "0__contains", "x__regex", "length"]
RELATED = ["call_data__params__url__contains", "response_body__startswith", "error_message__iregex", "key", "pk__in"]  # fmt: skip
OWN_PARAMETERS = {
    "callqueue": {"status__exact", "rule__exact"},
    "callattempt": {"outcome__exact", "rule__exact", "ended"},
    "hold": {"rule__exact"},
}


def lookups_of(field: Any) -> list[str]:
    """Every lookup and transform that a column knows, and paths into JSON."""
    found = [*field.get_lookups(), "exact__regex", "year__regex", "date__regex"]
    if field.get_internal_type() in ("JSONField", "TextField"):
        found += JSON_LOOKUPS
    return found + RELATED if field.is_relation else found


def test_no_lookup_in_an_address_but_the_filters_own(there: Scene) -> None:
    """With one, whoever may only look could read letter by letter what is redacted."""
    client, tried, kinds = viewer(), 0, set[str]()
    for made in admins():
        assert isinstance(made, OwnAdmin), "which refuses lookups"
        path = reverse(f"admin:callqueue_{made.opts.model_name}_changelist")
        if client.get(path).status_code == 302:  # it leads elsewhere, and reads no row
            continue
        own = OWN_PARAMETERS.get(str(made.opts.model_name), set())
        for field in made.opts.get_fields():
            # what refuses a lookup knows nothing of the column: all of them on one of each kind
            is_new = field.is_relation or field.get_internal_type() not in kinds
            kinds.add(field.get_internal_type())
            for lookup in {"", "exact", *(lookups_of(field) if is_new else ())}:
                name = f"{field.name}__{lookup}".removesuffix("__")
                expected = (200, 302) if name in own else (400,)
                assert client.get(path, {name: "1"}).status_code in expected, (path, name)
                tried += 1
    assert tried > 250


def test_every_link_of_a_list_works_and_it_is_sorted_by_number_alone(there: Scene) -> None:
    """What the filters offer is not refused with the rest. No other column has an index."""
    client, followed = viewer(), 0
    for made in admins():
        path = reverse(f"admin:callqueue_{made.opts.model_name}_changelist")
        for link in set(re.findall(r'href="(\?[^"]+)"', client.get(path).content.decode())):
            assert client.get(f"{path}{link.replace('&amp;', '&')}").status_code == 200, link
            followed += 1
    assert followed > 20
    path = reverse("admin:callqueue_callqueue_changelist")
    for place, column in enumerate(client.get(path).context["cl"].list_display):
        asked = client.get(path, {"o": str(place)}).context["cl"]
        assert asked.queryset.query.order_by[0] == "-id", column


# --- what a look may cost


@contextmanager
def counted_steps() -> Iterator[list[int]]:
    """Counts the lines of the app that run, in place of seconds, which tell more of the machine."""
    steps = [0]

    def line(frame: FrameType, event: str, _: Any) -> Any:
        steps[0] += event == "line"
        return line

    sys.settrace(lambda frame, *_: line if "/callqueue/" in frame.f_code.co_filename else None)
    try:
        yield steps
    finally:
        sys.settrace(None)


MOST_STEPS = 1_000_000  # of 100 to 300 nanoseconds, as machines go: 0.3 seconds
ALL_KINDS = [
    SlidingWindow("100/s"), SlidingWindow("7/m", per="key"), TokenBucket("5/s", burst=9, per="key"), Concurrency(3, per="key"),
    FixedWindow("3/s", timezone="America/Los_Angeles"), FixedWindow("1000/d"), SlidingWindow("3/s", per="queue", strict=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "limits",
    [[], ALL_KINDS[:1], [Concurrency(8)], ALL_KINDS],
    ids=["none", "one", "in flight", "all kinds"],
)
@pytest.mark.parametrize("rate", ["", "1000000000/s", "7"])
def test_a_what_if_costs_no_more_than_so_many_steps(
    rules: Rules, limits: list[Any], rate: str
) -> None:
    rules(default=Rule(limits=limits, queues=["a", "b"]))
    asked = {"name": "default", "limit": "default#0", "rate": rate}
    fits = bool(limits) and (not rate or ("/" in rate) is not limits[0].counts_in_flight)
    client = viewer()
    with counted_steps() as steps:
        page = client.get(reverse("admin:callqueue_rule"), asked)
    assert page.status_code == (200 if fits else 302)
    assert steps[0] < MOST_STEPS
