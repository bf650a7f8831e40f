"""call_data as a whole: what comes back of it, and what is refused by its field."""

from __future__ import annotations

import json
from collections import OrderedDict
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security.secrets import Secret, marked, unmarked
from callqueue.sending.call_data import check_params
from tests.support.length import examples
from tests.support.samples import (
    ANYWHERE,
    URL,
    call_datas,
    checked,
    http,
    refused,
)


class TestAGoodCall:
    def test_comes_back_as_a_plain_copy(self) -> None:
        call = http(json={"a": (1, 2.5, None, True)}, headers={"X-Trace": "é"})
        result = checked(call)
        assert result == http(json={"a": [1, 2.5, None, True]}, headers={"X-Trace": "é"})
        assert result is not call
        assert result["params"]["json"] is not call["params"]["json"]

    def test_carries_its_method_in_lower_case(self) -> None:
        call = checked({"method": "POST", "params": {"url": URL}})
        assert call == {"method": "post", "params": {"url": URL}}

    @pytest.mark.parametrize(
        "verb", ["get", "options", "head", "post", "put", "patch", "delete", "GET", "Patch"]
    )
    def test_may_use_every_verb_in_any_case(self, verb: str) -> None:
        assert checked({"method": verb, "params": {"url": URL}})["method"] == verb.lower()

    def test_may_name_a_handler_in_any_case(self) -> None:
        assert checked({"method": "Fax", "params": {}})["method"] == "fax"
        assert checked({"method": "SMS", "params": {"anything": [1]}})["method"] == "sms"

    def test_may_use_subclasses_of_the_json_types(self) -> None:
        class Text(str):
            pass

        class Colour(IntEnum):
            RED = 3

        class Point(NamedTuple):
            x: int
            y: int

        result = checked(
            http(json=OrderedDict([(Text("a"), Text("b")), ("c", Colour.RED), ("p", Point(1, 2))]))
        )
        assert result["params"]["json"] == {"a": "b", "c": 3, "p": [1, 2]}
        assert type(result["params"]["json"]["a"]) is str
        assert type(result["params"]["json"]["c"]) is int

    @pytest.mark.parametrize(
        "params",
        [
            {"params": {"q": ["a", "b", Secret("STRIPE")], "n": 1, "skip": None}},
            {"params": "a=b"},
            {"params": [["a", 1], ["a", 2]]},
            {"data": "raw text"},
            {"data": {"a": "b"}},
            {"data": [["a", "b"], ["a", Secret("STRIPE")]]},
            {
                "json": None,
                "data": None,
                "headers": None,
                "cookies": None,
                "auth": None,
                "params": None,
            },
            {"json": "text"},
            {"json": 0, "data": None},
            {"cookies": {"session": "a b,c"}},
            {"auth": ["user", "pass:word"]},
            {"auth": ("user", Secret("STRIPE"))},
            {"headers": {"Authorization": Secret("STRIPE"), "X-Empty": "", "X-Tab": "a\tb"}},
            {"json": {"big": 10**400}},
        ],
    )
    def test_may_say_what_requests_can_carry(self, params: dict[str, Any]) -> None:
        checked(http(**params))


class TestTheShape:
    @pytest.mark.parametrize("call_data", ["{}", None, [], 3, b"{}", MappingProxyType({})])
    def test_must_be_a_dict(self, call_data: Any) -> None:
        refused(call_data, "call_data", "must be a dict")

    def test_has_no_other_keys(self) -> None:
        refused({**http(), "parms": {}}, "call_data.parms", "did you mean 'params'?")
        refused({"method": "get", "url": URL, "params": {}}, "call_data.url", "belongs into params")

    @pytest.mark.parametrize(
        ("call_data", "field", "why"),
        [
            ({"params": {}}, "method", "is missing"),
            ({"method": "", "params": {}}, "method", "is missing"),
            ({"method": 7, "params": {}}, "method", "must be a string"),
            ({"method": ["get"], "params": {}}, "method", "must be a string"),
            ({"method": "pots", "params": {}}, "method", "did you mean 'post'?"),
            ({"method": "send-email", "params": {}}, "method", "did you mean 'send_email'?"),
            ({"method": "get"}, "params", "is missing"),
            ({"method": "get", "params": None}, "params", "must be a dict"),
            ({"method": "get", "params": [1]}, "params", "must be a dict"),
            ({"method": "sms", "params": "text"}, "params", "must be a dict"),
            ({"method": "sms", "params": Secret("STRIPE")}, "params", "inside params"),
            ({1: 2}, "call_data", "key that is not a string"),
        ],
    )
    def test_names_what_is_wrong(self, call_data: Any, field: str, why: str) -> None:
        refused(call_data, field, why)


class TestSecrets:
    def test_may_stand_for_the_url(self) -> None:
        checked({"method": "get", "params": {"url": Secret("STRIPE")}}, allowed_hosts=())

    @pytest.mark.parametrize("method", ["send_email", "celery_task"])
    def test_may_stand_for_any_string(self, method: str) -> None:
        secret = Secret("GITHUB")
        params = {"to": [secret], "subject": secret, "message": secret, "reply_to": secret}
        checked(
            {
                "method": method,
                "params": params if method == "send_email" else {"name": secret, "args": [secret]},
            }
        )

    @pytest.mark.parametrize(
        ("reference", "field", "why"),
        [
            (Secret("STRIP"), "params.json.a", "not in SECRETS: 'STRIP'"),
            (Secret("A\nB"), "params.json.a", r"not in SECRETS: 'A\nB'"),
            (Secret("\ud800"), "params.json.a", "half of a surrogate pair"),
        ],
    )
    def test_are_known_by_name_and_no_other_name_is_told(
        self, reference: Any, field: str, why: str
    ) -> None:
        error = refused(http(json={"a": reference}), field, why)
        assert "STRIPE" not in str(error)
        assert "GITHUB" not in str(error)

    @pytest.mark.parametrize(
        "data",
        [
            {"$secret": "STRIPE"}, {"$secret": "NO SUCH"}, {"$secret": 5}, {"$secret": None}, {"$secret": "STRIPE", "x": 1},
            {"$$secret": "STRIPE"}, {"$secret": {"$secret": "STRIPE"}}, [{"$$$secret": ["$secret"]}],
        ],
    )  # fmt: skip
    def test_are_not_named_by_data_that_looks_like_it(self, data: Any) -> None:
        for params in ({"json": data}, {"json": [{"a": data}]}):
            assert checked(http(**params))["params"]["json"] == params["json"]

    def test_are_kept_beside_data_that_looks_like_one(self) -> None:
        both = {"a": Secret("STRIPE"), "b": {"$secret": "STRIPE"}}
        assert checked(http(json=both))["params"]["json"] == both

    @pytest.mark.parametrize(
        "place",
        [{"headers": {"X-A": {"$secret": "STRIPE"}}}, {"auth": ["u", {"$secret": "STRIPE"}]}],
    )
    def test_the_former_way_to_name_one_is_pointed_out(self, place: Any) -> None:
        with pytest.raises(InvalidCall, match=r"callqueue\.Secret\(NAME\)"):
            checked(http(**place))

    @pytest.mark.parametrize("place", ["headers", "cookies"])
    def test_do_not_stand_for_dicts(self, place: str) -> None:
        refused(http(**{place: Secret("STRIPE")}), f"params.{place}", "not a secret")

    def test_are_checked_again_once_they_are_resolved(self) -> None:
        with pytest.raises(InvalidCall, match="line break"):
            check_params("get", {"url": URL, "headers": {"Authorization": "x\n"}}, ANYWHERE)


@settings(max_examples=examples(100, 400), deadline=None)
@given(call_datas, st.integers(20, 400))
def test_whatever_is_given_is_accepted_as_json_or_refused_by_field(
    call_data: Any, max_bytes: int
) -> None:
    try:
        result = checked(call_data, max_bytes=max_bytes)
    except (InvalidCall, NotAllowed) as error:
        str(error).encode()
        assert "\n" not in str(error)
        return
    text = json.dumps(marked(result), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assert unmarked(json.loads(text)) == result
    assert len(text.encode()) <= max_bytes
    assert "\\u0000" not in json.dumps(marked(result)).replace("\\\\", "")
    assert checked(result, max_bytes=max_bytes) == result
