"""send's arguments beside call_data: the text of a key, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
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

PARIS, AMERICA = timezone(timedelta(hours=1)), timezone(timedelta(hours=-1))


@shared_task(name="shop.tasks.paid")
def paid(call_id: int, status: str) -> None:
    """A callback."""


KEY_FLAWS = ["x" * 256, "a\0", "\ud800", '{"a": 1}', " {}", 5, ["a"], b"a", True, {1: "a"}, {"": "a"}, {"a": None},
             {"a": True}, {"a": 1.5}, {"a": "x" * 255}, {"a": 10**5000}, {"a\0": "b"}, {"a": "\0"},
             "a\nb", "\r", "\x1b[2J", "\x07", "a\x7f", "a\x9b", "a\u2028b", "a\tb", {"a": "b\n"}, {"a\r": "b"}]  # fmt: skip
COST_FLAWS = [-1, True, 1.5, "1", [1], 2**31, {"a": -1}, {"a": True}, {"a": 1.0}, {"": 1}, {1: 1}, {"a": None},
              {"a" * 300: 1}, {"a\0": 1}, {"a\n": 1}]  # fmt: skip
TEXT_FLAWS = ["", "a\0", "x" * 256, 5, b"x", "\ud800", "a\nb", "a\r", "\x1b[2J", "\x07", "a\x9b", "a\x7f",
              "\u2028", "a\tb"]  # fmt: skip
CHECKS: dict[str, tuple[Callable[[Any], Any], list[Any], list[Any]]] = {
    "key": (
        check_key,
        [(None, ""), ({}, ""), "", "tenant 7", "{not json", "[1]", "x" * 255,
         ({"w": "T1", "c": 9}, '{"c":"9","w":"T1"}'), ({"é": "ü"}, '{"é":"ü"}')],
        KEY_FLAWS,
    ),
    "cost": (check_cost, [(None, 1), ({}, 1), 1, 0, 500, {"tokens": 1500}, {"a": 0}], COST_FLAWS),
    "priority": (check_priority, [-32768, 0, 32767], [-32769, 32768, True, 1.0, "1", None]),
    "unique_key": (check_unique_key, [None, "order-5"], TEXT_FLAWS),
    "callback": (
        check_callback, [None, "shop.tasks.paid", (paid, "shop.tasks.paid")], [*TEXT_FLAWS, "a b", len],
    ),
}  # fmt: skip


@pytest.mark.parametrize("argument", CHECKS)
def test_an_argument_is_kept_in_one_form_or_refused_by_its_name(argument: str) -> None:
    check, good, wrong = CHECKS[argument]
    for one in good:
        value, kept = one if isinstance(one, tuple) else (one, one)
        assert check(value) == kept
    for value in wrong:
        with pytest.raises(InvalidCall, match=f"^{argument}"):
            check(value)


LATER = NOW + timedelta(hours=1)


@pytest.mark.parametrize(
    ("not_before", "expires_at", "field", "why"),
    [
        (None, None, "", ""),
        (NOW - timedelta(days=9), None, "", ""),
        (NOW, LATER, "", ""),
        (LATER, LATER.astimezone(PARIS), "", ""),
        (datetime(2031, 1, 1), None, "not_before", "naive"),
        (None, datetime(2031, 1, 1), "expires_at", "naive"),
        (None, NOW, "expires_at", "past"),
        (None, NOW - timedelta(seconds=1), "expires_at", "past"),
        (NOW + timedelta(2), NOW + timedelta(1), "expires_at", "before not_before"),
        (timedelta(1), None, "not_before", "must be a datetime"),
        ("2031-01-01", None, "not_before", "must be a datetime"),
        (date(2031, 1, 1), None, "not_before", "must be a datetime"),
        (None, 5, "expires_at", "must be a datetime"),
        (datetime.max.replace(tzinfo=AMERICA), None, "not_before", "out of the range"),
    ],
)
def test_times_are_aware_to_come_and_in_order(
    not_before: Any, expires_at: Any, field: str, why: str
) -> None:
    with pytest.raises(InvalidCall, match=why) if field else nullcontext() as caught:
        check_times(NOW, not_before, expires_at)
    assert not field or caught.value.field == field


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
