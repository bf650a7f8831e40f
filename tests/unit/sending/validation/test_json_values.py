"""What JSON has no word for, or too many words."""

from __future__ import annotations

import json
import math
from datetime import date, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from callqueue.exceptions import InvalidCall
from tests.support.samples import NOW, checked, http, refused


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels - 1):
        nested = [nested]
    return nested


class TestJson:
    @pytest.mark.parametrize(
        ("value", "why"),
        [
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
        ],
    )
    def test_names_the_path_of_what_it_has_no_word_for(self, value: Any, why: str) -> None:
        refused(
            http(json={"items": [0, 1, 2, {"price": value}]}), "params.json.items[3].price", why
        )

    def test_refuses_numbers_that_python_would_not_read_back(self) -> None:
        checked(http(json=[10**4299]))
        for sign in (1, -1):
            refused(http(json=[sign * 10**4300]), "params.json[0]", "digits")

    @pytest.mark.parametrize("key", [1, None, True, 1.5, (1, 2), b"k"])
    def test_has_only_strings_for_keys(self, key: Any) -> None:
        refused(http(json={"a": [{key: 1}]}), "params.json.a[0]", "key that is not a string")

    @pytest.mark.parametrize(("key", "why"), [("a\0", "NUL"), ("\udfff", "surrogate")])
    def test_has_only_storable_keys(self, key: str, why: str) -> None:
        refused(http(json={"a": {key: 1}}), "params.json.a", why)

    def test_shows_odd_keys_escaped_and_short(self) -> None:
        with pytest.raises(InvalidCall) as caught:
            checked(http(json={"a\r\n" + "b" * 500: math.nan}))
        assert "\n" not in caught.value.field
        assert len(caught.value.field) < 80

    def test_may_nest_64_deep_and_no_deeper(self) -> None:
        checked({"method": "sms", "params": {"a": deep(62)}})
        with pytest.raises(InvalidCall, match=r"^params\.a\[0\].*: is nested deeper than 64"):
            checked({"method": "sms", "params": {"a": deep(63)}})

    def test_refuses_a_hundred_thousand_levels_at_once(self) -> None:
        with pytest.raises(InvalidCall, match="deeper than 64"):
            checked(http(json=deep(100_000)))

    def test_refuses_what_contains_itself(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(InvalidCall, match="deeper than 64"):
            checked(http(json=loop))

    def test_refuses_what_unfolds_to_billions(self) -> None:
        laughs: list[Any] = ["ha"]
        for _ in range(40):
            laughs = [laughs, laughs]
        refused(
            http(json=laughs),
            "call_data",
            "more than 1048576 bytes of JSON; MAX_CALL_BYTES is 262144",
        )

    def test_is_measured_in_bytes_of_utf8(self) -> None:
        call = http(json="é" * 100)
        size = len(json.dumps(call, ensure_ascii=False, separators=(",", ":")).encode())
        assert checked(call, max_bytes=size) == call
        assert str(size) in refused(call, "call_data", max_bytes=size - 1)

    def test_counts_numbers_lists_and_names_exactly(self) -> None:
        call = {
            "method": "sms",
            "params": {"a": [1] * 50, "b": {"": 1, "c": 10**30}, "d": [[], {}, "", 0.5, None]},
        }
        size = len(json.dumps(call, separators=(",", ":")))
        assert checked(call, max_bytes=size) == call
        refused(call, "call_data", max_bytes=size - 1)

    def test_refuses_many_huge_numbers_without_writing_them(self) -> None:
        refused(http(json=[10**4299] * 100_000), "call_data", "more than")
