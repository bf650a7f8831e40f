"""What a call's data is written as is what is read back, on every database: the order of names and
the form of numbers too.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
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
    call = CallQueue.objects.send(
        {
            "params": {"json": payload, "url": URL, "headers": {"X-B": "1", "A": "2"}},
            "method": "post",
        }
    )
    assert call is not None
    return call


def stored() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT call_data FROM callqueue_callqueue")
        ((text,),) = cursor.fetchall()
    return str(text)


def test_names_keep_their_order_and_numbers_their_form() -> None:
    call = sent(ODD)
    read = CallQueue.objects.get(pk=call.pk)
    assert text_of(read.call_data["params"]["json"]) == text_of(ODD)
    assert list(read.call_data["params"]["headers"]) == ["X-B", "A"]
    assert text_of(read.call_data) == text_of(call.call_data)


def test_what_is_sent_in_bulk_and_what_is_updated_keeps_its_form_too() -> None:
    given = {"json": {"z": 1, "a": 1e16}, "data": {"z": "1", "a": "2"}, "params": {"z": 1, "a": 2}}
    calls = CallQueue.objects.send_many(
        {"method": "post", "params": {name: value, "url": URL}} for name, value in given.items()
    )
    stored = CallQueue.objects.order_by("pk").values_list("call_data", flat=True)
    for (name, value), data in zip(given.items(), stored, strict=True):
        assert text_of(data["params"][name]) == text_of(value)
    call = calls[0]
    read = CallQueue.objects.get(pk=call.pk)
    CallQueue.objects.filter(pk=call.pk).update(call_data={"zz": 1, "a": -0.0})
    assert text_of(CallQueue.objects.get(pk=call.pk).call_data) == text_of({"zz": 1, "a": -0.0})
    read.call_data = {"b": 1, "a": {"y": 1, "x": 1e20}}
    CallQueue.objects.bulk_update([read], ["call_data"])
    assert text_of(CallQueue.objects.get(pk=call.pk).call_data) == text_of(read.call_data)


def test_secrets_and_what_looks_like_them_keep_their_place(rules: Any) -> None:
    rules({"SECRETS": {"KEY": "s3cret"}})
    params = {"zz": Secret("KEY"), "a": {"$secret": "data", "a": 1}}
    read = CallQueue.objects.get(pk=sent(params).pk)
    assert read.call_data["params"]["json"] == params
    assert list(read.call_data["params"]["json"]) == ["zz", "a"]
    assert list(read.call_data["params"]["json"]["a"]) == ["$secret", "a"]


def test_what_is_encrypted_keeps_its_form(settings: Any) -> None:
    from cryptography.fernet import Fernet

    settings.CALLQUEUE = {"ENCRYPTION_KEYS": [Fernet.generate_key().decode()]}
    read = CallQueue.objects.get(pk=sent(ODD).pk)
    assert text_of(read.call_data["params"]["json"]) == text_of(ODD)
    assert stored().startswith("$sealed:")


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


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
        inner,
        max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["method", "zz", "a", "$sealed", "$plain", "é"]), documents))
@settings(
    max_examples=examples(60, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_document_comes_back_as_it_was(document: dict[str, Any]) -> None:
    call = CallQueue.objects.create(call_data=document)
    assert text_of(CallQueue.objects.get(pk=call.pk).call_data) == text_of(document)
