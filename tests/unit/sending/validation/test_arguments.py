"""send's arguments beside call_data: the text of a key, and what is refused."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import shared_task
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.exceptions import InvalidCall
from callqueue.sending.validation import (
    check_callback,
    check_cost,
    check_key,
    check_priority,
    check_times,
    check_unique_key,
)
from tests.support.length import examples
from tests.support.samples import NOW, texts, values

PARIS = timezone(timedelta(hours=1))


@shared_task(name="shop.tasks.paid")
def paid(call_id: int, status: str) -> None:
    """A callback."""


class TestTheKey:
    @pytest.mark.parametrize(
        ("key", "stored"),
        [
            ("", ""),
            (None, ""),
            ({}, ""),
            ("tenant 7", "tenant 7"),
            ("{not json", "{not json"),
            ("[1]", "[1]"),
            ({"w": "T1", "c": 9}, '{"c":"9","w":"T1"}'),
            ({"é": "ü"}, '{"é":"ü"}'),
            ("x" * 255, "x" * 255),
        ],
    )
    def test_has_one_canonical_text(self, key: Any, stored: str) -> None:
        assert check_key(key) == stored

    @pytest.mark.parametrize(
        "key",
        ["x" * 256, "a\0", "\ud800", '{"a": 1}', " {}", 5, ["a"], b"a", True, {1: "a"}, {"": "a"}, {"a": None},
         {"a": True}, {"a": 1.5}, {"a": "x" * 255}, {"a": 10**5000}, {"a\0": "b"}, {"a": "\0"},
         "a\nb", "\x1b[2J", "a\x7f", "a\x9b", "a\u2028b", "a\tb", {"a": "b\n"}, {"a\r": "b"}],
    )  # fmt: skip
    def test_is_refused(self, key: Any) -> None:
        with pytest.raises(InvalidCall, match="^key"):
            check_key(key)


class TestTheOtherArguments:
    @pytest.mark.parametrize(
        ("cost", "stored"),
        [
            (None, 1),
            (1, 1),
            (0, 0),
            (500, 500),
            ({}, 1),
            ({"tokens": 1500}, {"tokens": 1500}),
            ({"a": 0}, {"a": 0}),
        ],
    )
    def test_a_cost_is_units(self, cost: Any, stored: Any) -> None:
        assert check_cost(cost) == stored

    @pytest.mark.parametrize(
        "cost",
        [-1, True, 1.5, "1", [1], 2**31, {"a": -1}, {"a": True}, {"a": 1.0}, {"": 1}, {1: 1}, {"a": None},
         {"a" * 300: 1}, {"a\0": 1}, {"a\n": 1}],
    )  # fmt: skip
    def test_a_cost_that_is_none_is_refused(self, cost: Any) -> None:
        with pytest.raises(InvalidCall, match="^cost"):
            check_cost(cost)

    def test_a_priority_fits_its_column(self) -> None:
        assert [check_priority(p) for p in (-32768, 0, 32767)] == [-32768, 0, 32767]
        for wrong in (-32769, 32768, True, 1.0, "1", None):
            with pytest.raises(InvalidCall, match="^priority"):
                check_priority(wrong)
        with pytest.raises(InvalidCall, match="whole number, not a float"):
            check_priority(1.5)

    def test_times_are_aware_and_in_order(self) -> None:
        later = NOW + timedelta(hours=1)
        check_times(NOW, None, None)
        check_times(NOW, NOW - timedelta(days=9), None)
        check_times(NOW, NOW, later)
        check_times(NOW, later, later.astimezone(PARIS))

    @pytest.mark.parametrize(
        ("not_before", "expires_at", "field", "why"),
        [
            (datetime(2031, 1, 1), None, "not_before", "naive"),
            (None, datetime(2031, 1, 1), "expires_at", "naive"),
            (None, NOW, "expires_at", "past"),
            (None, NOW - timedelta(seconds=1), "expires_at", "past"),
            (NOW + timedelta(2), NOW + timedelta(1), "expires_at", "before not_before"),
            (timedelta(1), None, "not_before", "must be a datetime"),
            ("2031-01-01", None, "not_before", "must be a datetime"),
            (date(2031, 1, 1), None, "not_before", "must be a datetime"),
            (None, 5, "expires_at", "must be a datetime"),
            (
                datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
                None,
                "not_before",
                "out of the range",
            ),
        ],
    )
    def test_times_that_cannot_be_kept_are_refused(
        self, not_before: Any, expires_at: Any, field: str, why: str
    ) -> None:
        with pytest.raises(InvalidCall, match=why) as caught:
            check_times(NOW, not_before, expires_at)
        assert caught.value.field == field

    def test_a_unique_key_is_a_text_or_none(self) -> None:
        assert check_unique_key(None) is None
        assert check_unique_key("order-5") == "order-5"
        for wrong in ("", "a\0", "x" * 256, 5, b"x", "\ud800", "a\nb", "\x1b[2J"):
            with pytest.raises(InvalidCall, match="^unique_key"):
                check_unique_key(wrong)

    def test_a_callback_is_the_name_of_a_task(self) -> None:
        assert check_callback(None) is None
        assert check_callback("shop.tasks.paid") == "shop.tasks.paid"
        assert check_callback(paid) == "shop.tasks.paid"
        for wrong in ("", "a b", "a\0", "x" * 256, len, 5, "\ud800", "a\x1b[2J", "a\n", "a\x9b"):
            with pytest.raises(InvalidCall, match="^callback"):
                check_callback(wrong)


@settings(max_examples=examples(80, 300), deadline=None)
@given(st.none() | texts | values | st.dictionaries(texts, texts | st.integers(), max_size=3))
def test_a_key_is_stored_as_one_text_or_refused(key: Any) -> None:
    try:
        stored = check_key(key)
    except InvalidCall as error:
        assert error.field.startswith("key")
        return
    assert len(stored) <= 255
    assert "\0" not in stored
    if isinstance(key, dict) and key:
        assert json.loads(stored) == {name: str(value) for name, value in key.items()}
        assert check_key(dict(reversed(list(key.items())))) == stored
