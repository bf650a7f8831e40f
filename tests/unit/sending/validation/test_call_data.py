"""call_data as a whole: what comes back of it, and what is refused by its field."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from datetime import date, timedelta
from decimal import Decimal
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security.secrets import Secret, marked, unmarked
from callqueue.sending.call_data import check_params
from tests.support.length import examples
from tests.support.samples import (
    ANYWHERE,
    NOW,
    URL,
    call_datas,
    checked,
    http,
    refused,
)


def test_a_good_call_comes_back_as_a_plain_copy() -> None:
    class Text(str):
        pass

    class Colour(IntEnum):
        RED = 3

    class Point(NamedTuple):
        x: int
        y: int

    call = http(json={"a": (1, 2.5, None, True)}, headers={"X-Trace": "é"})
    result = checked(call)
    assert result == http(json={"a": [1, 2.5, None, True]}, headers={"X-Trace": "é"})
    assert result is not call
    assert result["params"]["json"] is not call["params"]["json"]
    given = OrderedDict([(Text("a"), Text("b")), ("c", Colour.RED), ("p", Point(1, 2))])
    plain = checked(http(json=given))["params"]["json"]
    assert plain == {"a": "b", "c": 3, "p": [1, 2]}
    assert (type(plain["a"]), type(plain["c"])) == (str, int)


@pytest.mark.parametrize(
    "method",
    ["get", "options", "head", "post", "put", "patch", "delete", "GET", "Patch", "Fax", "SMS"],
)
def test_a_method_is_known_in_any_case(method: str) -> None:
    assert checked({"method": method, "params": {"url": URL}})["method"] == method.lower()


SHAPES: list[tuple[Any, str, str]] = [
    *[(wrong, "call_data", "must be a dict") for wrong in ("{}", None, [], 3, b"{}", MappingProxyType({}))],
    ({**http(), "parms": {}}, "call_data.parms", "did you mean 'params'?"),
    ({"method": "get", "url": URL, "params": {}}, "call_data.url", "belongs into params"),
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
    (http(headers=Secret("STRIPE")), "params.headers", "not a secret"),
    (http(cookies=Secret("STRIPE")), "params.cookies", "not a secret"),
    (http(headers={"X-A": {"$secret": "STRIPE"}}), "params.headers.X-A", "callqueue.Secret(NAME)"),
    (http(auth=["u", {"$secret": "STRIPE"}]), "params.auth[1]", "callqueue.Secret(NAME)"),
    (http(json={"a": Secret("STRIP")}), "params.json.a", "not in SECRETS: 'STRIP'"),
    (http(json={"a": Secret("A\nB")}), "params.json.a", r"not in SECRETS: 'A\nB'"),
    (http(json={"a": Secret("\ud800")}), "params.json.a", "half of a surrogate pair"),
    *[(http(json={"a": [{key: 1}]}), "params.json.a[0]", "key that is not a string") for key in (1, None, 1.5, (1, 2), b"k")],
    (http(json={"a": {"a\0": 1}}), "params.json.a", "NUL"),
    (http(json={"a": {"\udfff": 1}}), "params.json.a", "surrogate"),
    (http(json=[10**4300]), "params.json[0]", "digits"),
    (http(json=[-(10**4300)]), "params.json[0]", "digits"),
]  # fmt: skip
NO_JSON: list[tuple[Any, str]] = [
    (math.nan, "NaN"),
    (math.inf, "Infinity"),
    (-math.inf, "Infinity"),
    (float("1e400"), "finite"),
    (b"bytes", "base64"),
    (bytearray(b"bytes"), "base64"),
    (NOW, "isoformat"),
    (date(2030, 1, 1), "isoformat"),
    (timedelta(1), "total_seconds"),
    ({1, 2}, "sorted list"),
    (frozenset(), "sorted list"),
    (MappingProxyType({}), "dict(...)"),
    (Decimal("1.5"), "Decimal"),
    (UUID(int=1), "UUID"),
    (object(), "object"),
    (1j, "complex"),
    ("a\0b", "NUL"),
    ("\ud800", "surrogate"),
    (len, "not JSON"),
]


@pytest.mark.parametrize(
    ("call_data", "field", "why"),
    [
        *SHAPES,
        *[
            (http(json={"i": [0, 1, {"p": one}]}), "params.json.i[2].p", why)
            for one, why in NO_JSON
        ],
    ],
)
def test_what_is_wrong_is_named_by_its_place(call_data: Any, field: str, why: str) -> None:
    """And no name of a secret but the one that was asked for."""
    said = refused(call_data, field, why)
    assert "GITHUB" not in said and "STRIPE" not in said


def test_a_key_is_shown_escaped_and_short() -> None:
    with pytest.raises(InvalidCall) as caught:
        checked(http(json={"a\r\n" + "b" * 500: math.nan}))
    assert "\n" not in caught.value.field
    assert len(caught.value.field) < 80


@pytest.mark.parametrize(
    "data",
    [
        {"$secret": "STRIPE"}, {"$secret": "NO SUCH"}, {"$secret": 5}, {"$secret": None}, {"$secret": "STRIPE", "x": 1},
        {"$$secret": "STRIPE"}, {"$secret": {"$secret": "STRIPE"}}, [{"$$$secret": ["$secret"]}],
    ],
)  # fmt: skip
def test_data_that_looks_like_a_secrets_name_is_kept_beside_secrets(data: Any) -> None:
    for value in (data, [{"a": data}], {"a": Secret("STRIPE"), "b": data}):
        assert checked(http(json=value))["params"]["json"] == value


def test_a_secret_is_checked_again_once_it_is_resolved() -> None:
    checked({"method": "get", "params": {"url": Secret("STRIPE")}}, allowed_hosts=())
    with pytest.raises(InvalidCall, match="line break"):
        check_params("get", {"url": URL, "headers": {"Authorization": "x\n"}}, ANYWHERE)


# --- What JSON has too many words for


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels - 1):
        nested = [nested]
    return nested


def test_nothing_nests_deeper_than_64_and_nothing_unfolds_without_end() -> None:
    checked({"method": "sms", "params": {"a": deep(62)}})
    loop, laughs = list[Any](), list[Any](["ha"])
    loop.append(loop)
    for nested in (deep(63), deep(100_000), loop):
        with pytest.raises(InvalidCall, match=r"^params\.a\[0\].*: is nested deeper than 64"):
            checked({"method": "sms", "params": {"a": nested}})
    for _ in range(40):
        laughs = [laughs, laughs]
    more = "more than 1048576 bytes of JSON; MAX_CALL_BYTES is 262144"
    refused(http(json=laughs), "call_data", more)
    checked(http(json=[10**4299]))
    refused(http(json=[10**4299] * 100_000), "call_data", "more than")  # without writing them


NUMBERS = {"a": [1] * 50, "b": {"": 1, "c": 10**30}, "d": [[], {}, "", 0.5, None]}


@pytest.mark.parametrize("call", [http(json="é" * 100), {"method": "sms", "params": NUMBERS}])
def test_a_call_is_measured_exactly_in_bytes_of_utf8(call: Any) -> None:
    size = len(json.dumps(call, ensure_ascii=False, separators=(",", ":")).encode())
    assert checked(call, max_bytes=size) == call
    assert str(size) in refused(call, "call_data", max_bytes=size - 1)


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
