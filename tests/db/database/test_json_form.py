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
from callqueue.database import FORM, in_form, with_form
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


def stored() -> dict[str, Any]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT call_data FROM callqueue_callqueue")
        ((text,),) = cursor.fetchall()
    document: dict[str, Any] = json.loads(text)
    return document


def test_names_keep_their_order_and_numbers_their_form() -> None:
    call = sent(ODD)
    read = CallQueue.objects.get(pk=call.pk)
    assert text_of(read.call_data["params"]["json"]) == text_of(ODD)
    assert list(read.call_data["params"]["headers"]) == ["X-B", "A"]
    assert text_of(read.call_data) == text_of(call.call_data)


def test_what_is_sent_in_bulk_and_what_is_updated_keeps_its_form_too() -> None:
    (call, _) = CallQueue.objects.send_many(
        {"method": "post", "params": {"url": URL, "json": {"z": n, "a": 1e16}}} for n in range(2)
    )
    read = CallQueue.objects.get(pk=call.pk)
    assert text_of(read.call_data["params"]["json"]) == text_of({"z": 0, "a": 1e16})
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
    assert list(stored()) == ["$sealed"]


def test_queries_look_into_the_data_and_compare_it_as_before() -> None:
    call = sent({"zz": 1, "a": {"b": 2, "a": 3}})
    found = CallQueue.objects.filter(call_data__params__json__a__a=3)
    assert found.get() == call
    assert found.filter(call_data__method="post").exists()
    if connection.features.supports_json_field_contains:
        assert found.filter(
            call_data__contains={"params": {"json": {"zz": 1, "a": {"a": 3, "b": 2}}}}
        )
    if connection.vendor == "postgresql":
        assert CallQueue.objects.filter(call_data=call.call_data).get() == call
        assert not CallQueue.objects.filter(call_data={"method": "post"}).exists()


def test_data_that_has_the_notes_name_is_data() -> None:
    for data in ({FORM: "x"}, {FORM: "{}", "z": 1, "a": 2}, {"$plain": {FORM: "0"}}):
        call = CallQueue.objects.create(call_data=data)
        assert text_of(CallQueue.objects.get(pk=call.pk).call_data) == text_of(data)


def test_a_note_that_fits_no_more_does_no_harm() -> None:
    note = text_of({"zz": {"y": 0, "x": "1e+16"}, "gone": 0, "a": ["-0.0", 1], "n": "1e+16"})
    changed = {"a": [0.5, 0.0, {"k": 1}], "new": 1, "n": 17, "zz": "text"}
    read = in_form({**changed, FORM: note})
    assert read == changed
    for broken in ("[", '["a"]', "7", '{"a": "no number"}'):
        assert in_form({**changed, FORM: broken}) == changed


def test_a_note_on_a_number_that_is_now_too_large_for_a_float_does_no_harm() -> None:
    changed = {"z": 10**400, "a": 1}
    assert in_form({**changed, FORM: '{"z":"1e+16","a":0}'}) == changed


def test_what_postgresql_keeps_by_itself_has_no_note() -> None:
    sent({"id": 1, "name": "x", "a_float": 1.5})
    CallQueue.objects.update(call_data={"method": "post", "params": {"url": URL, "json": {"a": 1}}})
    assert FORM not in stored()


def test_many_alike_take_little_room() -> None:
    rows = [{"name": "x", "id": n} for n in range(1000)]
    note = with_form({"params": {"json": rows}})[FORM]
    assert len(note) < 2100


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


@given(st.dictionaries(st.sampled_from(["method", "zz", "a", "$form", "$plain", "é"]), documents))
@settings(
    max_examples=examples(60, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_document_comes_back_as_it_was(document: dict[str, Any]) -> None:
    call = CallQueue.objects.create(call_data=document)
    assert text_of(CallQueue.objects.get(pk=call.pk).call_data) == text_of(document)


@pytest.mark.parametrize("name", ["json", "data", "params"])
def test_a_copy_of_a_calls_params_is_in_order(name: str) -> None:
    call = CallQueue.objects.send(
        {"method": "post", "params": {name: {"zz": "1", "a": "2"}, "url": URL}}
    )
    assert call is not None
    assert list(CallQueue.objects.values_list("call_data", flat=True)[0]["params"][name]) == [
        "zz",
        "a",
    ]
