"""Secrets are named by code and never by data, and no error tells one."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given
from hypothesis import strategies as st

import callqueue
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.security.secrets import (
    Secret,
    SecretContext,
    SecretError,
    SecretFor,
    has_secret,
    mark_secrets,
    replace_secrets,
    secrets_from_references,
    unmark_secrets,
)

HERE = SecretContext("default", "shop-7", "api.example.com")


def test_a_secret_is_equal_by_its_name_and_part_of_no_text() -> None:
    assert callqueue.Secret("A") == Secret("A") != Secret("B")
    assert repr(Secret("A")) == "Secret('A')"
    assert Secret("A") != {"$secret": "A"}
    name: Any
    for name in ("", None, 5, b"A"):
        with pytest.raises(InvalidCall, match="name of a secret"):
            Secret(name)
    with pytest.raises(TypeError, match="stands for a whole string"):
        f"Bearer {Secret('A')}"
    with pytest.raises(TypeError):
        "Bearer " + Secret("A")
    with pytest.raises(TypeError):
        json.dumps({"a": Secret("A")})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.builds(Secret, st.text(min_size=1, max_size=5)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["$secret", "$$secret", "$$$secret", "secret"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_the_stored_form_is_json_and_comes_back_as_it_was(value: Any) -> None:
    """That of data never names a secret."""
    assert unmark_secrets(json.loads(json.dumps(mark_secrets(value)))) == value
    assert has_secret(value) == has_secret(unmark_secrets(mark_secrets(value)))


@pytest.mark.parametrize(
    "odd",
    [{"$secret": 5}, {"$secret": "A", "b": 1}, {"$secret": ""}, {"$secret": {"$secret": 1}}],
)
def test_what_send_never_wrote_is_data_and_refused_in_a_file(odd: Any) -> None:
    """Of calls that were stored before, and of a file that may use it, it is what was meant."""
    assert unmark_secrets({"a": odd}) == {"a": odd}
    with pytest.raises(InvalidCall, match="and nothing else"):
        secrets_from_references({"method": "get", "params": {"json": [odd]}})
    assert unmark_secrets({"a": [{"$secret": "A"}], "b": 1}) == {"a": [Secret("A")], "b": 1}
    allowed = secrets_from_references({"a": {"$secret": "A"}, "b": {"$$secret": "A"}})
    assert allowed == {"a": Secret("A"), "b": {"$secret": "A"}}


def test_values_stand_in_the_place_of_secrets_and_data_stays() -> None:
    params = {"url": "u", "json": [{"a": Secret("A")}, (Secret("B"), 1, None, {"$secret": "A"})]}
    assert has_secret(params) and has_secret(Secret("A"))
    assert not has_secret({"a": {"$secret": "A"}}) and not has_secret(5)
    assert replace_secrets(params, {"A": "alpha", "B": "beta"}.__getitem__) == {
        "url": "u",
        "json": [{"a": "alpha"}, ["beta", 1, None, {"$secret": "A"}]],
    }
    assert params["json"][0] == {"a": Secret("A")}


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("v", "v"),
        (lambda: "v", "v"),
        (lambda context: f"{context.rule} {context.key} {context.host}", "default shop-7 api.example.com"),
        (lambda c, other="x": c.key + other, "shop-7x"),
        # how callables are made in a loop: their own defaults are left alone
        (lambda name="own": name, "own"),
        (partial({"A": "kept"}.get, "A"), "kept"),
    ],
)  # fmt: skip
def test_a_secrets_value_is_given_or_what_a_callable_returns(source: Any, value: str) -> None:
    assert SecretFor(source).value("A", HERE) == value


@pytest.mark.parametrize("answer", ["", None, b"hunter2", 5, ["hunter2"]])
def test_an_answer_that_is_no_text_is_refused(answer: Any) -> None:
    with pytest.raises(SecretError, match="secret 'A' is not a non-empty string") as caught:
        SecretFor(lambda: answer).value("A", HERE)
    assert isinstance(caught.value, CallQueueError)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_neither_a_value_nor_the_error_of_a_callable_is_shown(error: type[BaseException]) -> None:
    def vault() -> str:
        raise error("token hunter2 has expired")

    raised = f"'VAULT': its callable raised {error.__name__}"
    with pytest.raises(SecretError, match=raised) as caught:
        SecretFor(vault).value("VAULT", HERE)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert "hunter2" not in repr(SecretFor("hunter2", hosts=["a.example"]))


@pytest.mark.parametrize(
    ("source", "places", "why"),
    [
        (5, {}, "its value is neither a string nor a callable, but int"),
        ("", {}, "an empty string"),
        (["hunter2"], {}, "but list"),
        ("hunter2", {"hosts": []}, "hosts: is empty"),
        ("hunter2", {"rules": ()}, "rules: is empty"),
        ("hunter2", {"hosts": [5]}, "hosts: is not a list of names"),
        ("hunter2", {"hosts": ["https://a.example/"]}, "hosts: one of them is not among"),
        ("hunter2", {"rules": 5}, "rules: is not a list of names"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_type_only(
    source: Any, places: Any, why: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=why) as caught:
        SecretFor(source, **places)
    assert "hunter2" not in str(caught.value)
