"""Secrets are named by code and never by data, each goes only where it may, and no error
tells one.
"""

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
    marked,
    references_to,
    resolve,
    unmarked,
)

HERE = SecretContext("default", "shop-7", "api.example.com")


class TestSecret:
    def test_is_public_and_equal_by_its_name(self) -> None:
        assert callqueue.Secret("A") == Secret("A") != Secret("B")
        assert repr(Secret("A")) == "Secret('A')"
        assert Secret("A") != {"$secret": "A"}

    @pytest.mark.parametrize("name", ["", None, 5, b"A"])
    def test_has_a_name(self, name: Any) -> None:
        with pytest.raises(InvalidCall, match="name of a secret"):
            Secret(name)

    def test_is_no_part_of_a_text(self) -> None:
        with pytest.raises(TypeError, match="stands for a whole string"):
            f"Bearer {Secret('A')}"
        with pytest.raises(TypeError):
            "Bearer " + Secret("A")  # type: ignore[operator]

    def test_is_no_json_by_accident(self) -> None:
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


class TestTheStoredForm:
    @given(json_values)
    def test_is_json_and_comes_back_as_it_was(self, value: Any) -> None:
        assert unmarked(json.loads(json.dumps(marked(value)))) == value

    @given(json_values.filter(lambda value: not has_secret(value)))
    def test_of_data_never_names_a_secret(self, value: Any) -> None:
        assert not has_secret(unmarked(marked(value)))

    def test_of_calls_stored_before_is_read_as_it_was_meant(self) -> None:
        assert unmarked({"a": [{"$secret": "A"}], "b": 1}) == {"a": [Secret("A")], "b": 1}

    @pytest.mark.parametrize(
        "odd",
        [{"$secret": 5}, {"$secret": "A", "b": 1}, {"$secret": ""}, {"$secret": {"$secret": 1}}],
    )
    def test_of_nothing_that_send_wrote_is_data(self, odd: Any) -> None:
        assert unmarked({"a": odd}) == {"a": odd}

    def test_is_what_a_file_may_be_allowed_to_use(self) -> None:
        assert references_to({"a": {"$secret": "A"}, "b": {"$$secret": "A"}}) == {
            "a": Secret("A"),
            "b": {"$secret": "A"},
        }

    @pytest.mark.parametrize("odd", [{"$secret": 5}, {"$secret": "A", "b": 1}, {"$secret": ""}])
    def test_is_refused_in_a_file_where_it_is_malformed(self, odd: Any) -> None:
        with pytest.raises(InvalidCall, match="and nothing else"):
            references_to({"method": "get", "params": {"json": [odd]}})


class TestResolve:
    def test_puts_values_in_the_place_of_secrets_and_leaves_data(self) -> None:
        params = {
            "url": "u",
            "json": [{"a": Secret("A")}, (Secret("B"), 1, None, {"$secret": "A"})],
        }
        assert resolve(params, {"A": "alpha", "B": "beta"}.__getitem__) == {
            "url": "u",
            "json": [{"a": "alpha"}, ["beta", 1, None, {"$secret": "A"}]],
        }
        assert params["json"][0] == {"a": Secret("A")}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"a": [1, {"b": (Secret("A"),)}]}, True),
        (Secret("A"), True),
        ({"a": {"$secret": "A"}}, False),
        (5, False),
    ],
)
def test_secrets_are_seen_anywhere(params: Any, expected: bool) -> None:
    assert has_secret(params) is expected


class TestSecretFor:
    def test_is_a_value_or_what_a_callable_returns(self) -> None:
        assert SecretFor("v").value("A", HERE) == "v"
        assert SecretFor(lambda: "v").value("A", HERE) == "v"

    def test_gives_the_context_to_a_callable_that_asks_for_it(self) -> None:
        assert SecretFor(lambda context: f"{context.rule} {context.key} {context.host}").value(
            "A", HERE
        ) == ("default shop-7 api.example.com")
        assert SecretFor(lambda c, other="x": c.key + other).value("A", HERE) == "shop-7x"

    def test_leaves_a_callables_own_default_alone(self) -> None:
        """`lambda name=name: ...` and `partial(vault.get, "NAME")` are how callables are made in a
        loop.
        """
        assert SecretFor(lambda name="own": name).value("A", HERE) == "own"
        assert SecretFor(partial({"A": "kept"}.get, "A")).value("A", HERE) == "kept"

    @pytest.mark.parametrize("answer", ["", None, b"hunter2", 5, ["hunter2"]])
    def test_refuses_an_answer_that_is_no_text(self, answer: Any) -> None:
        with pytest.raises(SecretError, match="secret 'A' is not a non-empty string") as caught:
            SecretFor(lambda: answer).value("A", HERE)
        assert isinstance(caught.value, CallQueueError)
        assert "hunter2" not in str(caught.value)

    def test_keeps_the_error_of_a_callable_to_itself(self) -> None:
        def vault() -> str:
            raise RuntimeError("token hunter2 has expired")

        with pytest.raises(
            SecretError, match="'VAULT': its callable raised RuntimeError"
        ) as caught:
            SecretFor(vault).value("VAULT", HERE)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None

    def test_does_not_show_its_value(self) -> None:
        assert "hunter2" not in repr(SecretFor("hunter2", hosts=["a.example"]))

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            ({"source": 5}, "its value is neither a string nor a callable, but int"),
            ({"source": ""}, "an empty string"),
            ({"source": ["hunter2"]}, "but list"),
            ({"source": "hunter2", "hosts": []}, "hosts: is empty"),
            ({"source": "hunter2", "rules": ()}, "rules: is empty"),
            ({"source": "hunter2", "hosts": [5]}, "hosts: is not a list of names"),
            (
                {"source": "hunter2", "hosts": ["https://a.example/"]},
                "hosts: one of them is not among",
            ),
            ({"source": "hunter2", "rules": 5}, "rules: is not a list of names"),
        ],
    )
    def test_refuses_what_it_cannot_use_and_names_types_only(
        self, arguments: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(ImproperlyConfigured, match=why) as caught:
            SecretFor(arguments.pop("source"), **arguments)
        assert "hunter2" not in str(caught.value)
