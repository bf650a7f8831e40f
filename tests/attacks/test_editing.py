"""Whoever may edit tries to see what is hidden, or to make another kind of call of it."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from callqueue.admin import edit_call
from callqueue.admin.curl import as_curl
from callqueue.exceptions import InvalidCall
from callqueue.security.redaction import REDACTED, redact_call_data
from tests.support.length import examples

HIDDEN = ("s3cr3t-a", "s3cr3t-b", "s3cr3t-c")
NAMES = st.sampled_from(
    ["password", "token", "comment", "user", "key", "Authorization", "auth", "data", "x", "max_tokens", REDACTED]
)  # fmt: skip
LEAVES = st.sampled_from([*HIDDEN, "plain", "", 0, 1, True, None, 1.5, "Bearer s3cr3t-a", "https://v.example/?token=s3cr3t-b",
                          '{"password": "s3cr3t-c"}', "password=s3cr3t-a", REDACTED])  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(NAMES, inner, max_size=4)
        | st.lists(st.tuples(NAMES, inner).map(list), max_size=4)
    ),
    max_leaves=12,
)
URLS = ["https://v.example/a", "https://v.example/a?token=s3cr3t-a", "https://v.example:444/a"]
PARAMS = st.fixed_dictionaries(
    {"url": st.sampled_from(URLS)},
    optional=dict.fromkeys(("headers", "cookies", "auth", "params", "data", "json"), VALUES),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a value."""
    items: Any = {}
    if isinstance(value, dict):
        items = value
    elif isinstance(value, list):
        items = dict(enumerate(value))
    return [path, *(place for name in items for place in places(items[name], (*path, name)))]


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for name in place:
        value = value[name]
    return value


def mangle(draw: st.DrawFn, edited: Any) -> Any:
    """One thing that somebody might do with a text."""
    edited = copy.deepcopy(edited)
    inside = [at(edited, place) for place in places(edited)]
    holders = [one for one in inside if isinstance(one, (dict, list)) and one]
    if not holders:
        return edited
    holder = draw(st.sampled_from(holders))
    names = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    name, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    source, value = copy.deepcopy(draw(st.sampled_from(inside))), holder[name]
    act = draw(st.sampled_from(["rename", "swap", "copy", "delete", "reverse", "wrap", "type"]))
    if act == "swap":
        holder[name], holder[other] = holder[other], holder[name]
    elif act == "copy":
        holder[name] = source
    elif act == "delete":
        del holder[name]
    elif act == "wrap":
        holder[name] = draw(st.sampled_from([[value], {"comment": value}, [["comment", value]]]))
    elif act == "type":
        holder[name] = draw(VALUES.filter(lambda value: "s3cr3t" not in json.dumps(value)))
    elif isinstance(holder, list):
        holder.insert(0, source) if act == "rename" else holder.reverse()
    elif act == "rename":
        holder[draw(NAMES)] = holder.pop(name)
    else:
        items = list(holder.items())[::-1]
        holder.clear()
        holder.update(items)
    return edited


@st.composite
def edits(draw: st.DrawFn) -> tuple[Any, Any]:
    """A stored request, and what somebody made of the text that shows it."""
    method = draw(st.sampled_from(["post", "post", "post", "celery_task", "send_email", "own"]))
    stored = {"method": method, "params": draw(PARAMS)}
    edited = redact_call_data(stored)
    for _ in range(draw(st.integers(1, 3))):
        edited = mangle(draw, edited)
    return stored, edited


def seen(call_data: Any) -> str:
    """All that a page says of a request."""
    params = call_data.get("params") if isinstance(call_data, dict) else None
    return edit_call.as_json(redact_call_data(call_data)) + as_curl("post", params)


def test_no_edit_shows_what_was_hidden_nor_makes_another_kind_of_call() -> None:
    kept, most = 0, examples(100, 5000)

    @hypothesis_settings(max_examples=most)
    @given(edits())
    def attack(edit: tuple[Any, Any]) -> None:
        nonlocal kept
        stored, edited = edit
        before = seen(stored)
        try:
            laid = edit_call.read_edited(json.dumps(edited), stored)
        except InvalidCall as error:
            assert not any(secret in str(error) for secret in HIDDEN)
            return
        kept += 1
        for secret in HIDDEN:
            assert secret in before or secret not in seen(laid), (stored, edited, laid)
        assert laid["method"] == stored["method"]
        if stored["method"] == "post":
            assert laid["params"]["url"].split("/")[:3] == stored["params"]["url"].split("/")[:3]
        else:
            assert stored["method"] == "own" or laid["params"] == stored["params"]

    attack()
    assert kept > most / 20, "most edits are refused, some are not"


@hypothesis_settings(max_examples=examples(100, 300))
@given(PARAMS)
def test_an_edit_that_changes_nothing_keeps_everything(params: Any) -> None:
    stored = {"method": "post", "params": params}
    shown = redact_call_data(stored)
    if REDACTED in json.dumps(stored):
        return  # a text that says [redacted] itself cannot be told from one that was
    assert edit_call.read_edited(edit_call.as_json(shown), stored) == stored
