"""A call's data is read back as it was written: order of names and form of numbers, too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.core.exceptions import ValidationError
from django.db import connection
from django.forms import modelform_factory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callqueue import Secret
from callqueue.fields import UNREADABLE
from callqueue.models import CallQueue
from tests.support.length import examples

pytestmark = pytest.mark.django_db
URL = "https://api.example.com/"
ODD: dict[str, Any] = {
    "zz": 1,
    "a": {"longer": [1e16, -0.0, 0.0, 1.0, 1, 1e-7, 3e300, 10**30], "b": None},
    "rows": [{"zeta": n, "id": n} for n in range(3)] + [{"id": 3}],
    "é": {"ab": 1, "é": 2, "b": True},
    "": "",
}


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def sent(payload: Any) -> CallQueue:
    params = {"json": payload, "url": URL, "headers": {"X-B": "1", "A": "2"}}
    call = CallQueue.objects.send({"params": params, "method": "post"})
    assert call is not None
    return call


@pytest.mark.parametrize("keys", [[], [Fernet.generate_key().decode()]], ids=["plain", "sealed"])
def test_names_keep_their_order_and_numbers_their_form(settings: Any, keys: list[str]) -> None:
    settings.CALLQUEUE = {"ENCRYPTION_KEYS": keys}
    call = sent(ODD)
    read = CallQueue.objects.get(pk=call.pk)
    assert text_of(read.call_data["params"]["json"]) == text_of(ODD)
    assert list(read.call_data["params"]["headers"]) == ["X-B", "A"]
    assert text_of(read.call_data) == text_of(call.call_data)
    with connection.cursor() as cursor:
        cursor.execute("SELECT call_data FROM callqueue_callqueue")
        assert cursor.fetchone()[0].startswith("$sealed:") == bool(keys)


def test_a_form_leaves_the_data_out_and_validation_takes_nothing_that_is_no_json() -> None:
    """It would be stored as what cannot be read."""
    call = sent(ODD)
    before = text_of(call.call_data)
    form = modelform_factory(CallQueue, fields="__all__")
    data = {name: form(instance=call)[name].value() for name in form.base_fields}
    posted = form({name: value for name, value in data.items() if value is not None}, instance=call)
    assert posted.is_valid(), posted.errors
    posted.save()
    read = CallQueue.objects.get(pk=call.pk)
    assert text_of(read.call_data) == before
    read.full_clean()
    read.call_data = str(read.call_data)
    with pytest.raises(ValidationError, match="call_data"):
        read.full_clean()


def test_what_is_sent_in_bulk_and_what_is_updated_keeps_its_form_too() -> None:
    given = {"json": {"z": 1, "a": 1e16}, "data": {"z": "1", "a": "2"}, "params": {"z": 1, "a": 2}}
    sent = CallQueue.objects.send_many(
        {"method": "post", "params": {name: value, "url": URL}} for name, value in given.items()
    )
    calls = CallQueue.objects.in_bulk()
    for call, (name, value) in zip(sent, given.items(), strict=True):
        assert text_of(calls[call.pk].call_data["params"][name]) == text_of(value)
    first, second, _ = sent
    CallQueue.objects.filter(pk=first.pk).update(call_data={"zz": 1, "a": -0.0})
    second.call_data = {"b": 1, "a": {"y": 1, "x": 1e20}}
    CallQueue.objects.bulk_update([second], ["call_data"])
    calls = CallQueue.objects.in_bulk()
    assert text_of(calls[first.pk].call_data) == text_of({"zz": 1, "a": -0.0})
    assert text_of(calls[second.pk].call_data) == text_of(second.call_data)


def test_secrets_and_what_looks_like_them_keep_their_place(rules: Any) -> None:
    rules({"SECRETS": {"KEY": "s3cret"}})
    params = {"zz": Secret("KEY"), "a": {"$secret": "data", "a": 1}}
    read = CallQueue.objects.get(pk=sent(params).pk)
    assert read.call_data["params"]["json"] == params
    assert list(read.call_data["params"]["json"]) == ["zz", "a"]
    assert list(read.call_data["params"]["json"]["a"]) == ["$secret", "a"]


def test_data_that_looks_like_what_is_sealed_is_data() -> None:
    for data in ({"$sealed": "x"}, {"$plain": {"z": "0", "a": 1}}, {"$row:": 1}, "$sealed:x"):
        call = CallQueue.objects.create(call_data=data)
        assert text_of(CallQueue.objects.get(pk=call.pk).call_data) == text_of(data)


def test_what_others_wrote_and_is_no_json_stops_no_query() -> None:
    call = CallQueue.objects.create(call_data={"a": 1})
    for text in ("{", "", "nonsense", "[" * 100_000):
        with connection.cursor() as cursor:
            cursor.execute("UPDATE callqueue_callqueue SET call_data = %s", [text])
        assert CallQueue.objects.get(pk=call.pk).call_data == UNREADABLE


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
documents = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=25,
)


@given(st.dictionaries(st.sampled_from(["method", "zz", "a", "$sealed", "$plain", "é"]), documents))
@settings(
    max_examples=examples(60, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_document_comes_back_as_it_was(document: dict[str, Any]) -> None:
    call = CallQueue.objects.create(call_data=document)
    assert text_of(CallQueue.objects.get(pk=call.pk).call_data) == text_of(document)
