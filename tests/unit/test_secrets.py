"""Secrets are resolved late, named in errors and never shown, and found again in whatever spelling they come back."""

from __future__ import annotations

import html
import json
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.exceptions import CallQueueError
from callqueue.secrets import SecretError, has_secret, resolve, scrub, scrub_json

KEY = "sk_live/4eC3+9Hq=&é\"x'"


class TestResolve:
    def test_puts_values_in_the_place_of_references(self) -> None:
        params = {"url": "u", "json": [{"a": {"$secret": "A"}}, ({"$secret": "B"}, 1, None)]}
        resolved, values = resolve(params, {"A": "alpha", "B": lambda: "beta", "C": "unused"})
        assert resolved == {"url": "u", "json": [{"a": "alpha"}, ["beta", 1, None]]}
        assert values == ("alpha", "beta")
        assert params["json"][0] == {"a": {"$secret": "A"}}

    def test_without_references_gives_an_equal_copy_and_nothing_to_scrub(self) -> None:
        assert resolve({"a": [1]}, {"A": "alpha"}) == ({"a": [1]}, ())

    def test_calls_a_callable_once(self) -> None:
        values = iter(["first value", "second value"])
        resolved, _ = resolve([{"$secret": "A"}] * 3, {"A": lambda: next(values)})
        assert resolved == ["first value"] * 3

    @pytest.mark.parametrize(
        ("reference", "secrets"),
        [
            ({"$secret": "MISSING"}, {}),
            ({"$secret": "NAME"}, {"NAME": ""}),
            ({"$secret": "NAME"}, {"NAME": lambda: ""}),
            ({"$secret": "NAME"}, {"NAME": lambda: None}),
            ({"$secret": "NAME"}, {"NAME": lambda: b"hunter2"}),
            ({"$secret": "NAME"}, {"NAME": 5}),
            ({"$secret": 5}, {}),
            ({"$secret": "NAME", "x": "hunter2"}, {"NAME": "hunter2"}),
            ({"$secret": ["hunter2"]}, {}),
        ],
    )
    def test_refuses_what_has_no_value(self, reference: Any, secrets: dict[str, Any]) -> None:
        with pytest.raises(SecretError) as caught:
            resolve({"a": reference}, secrets)
        assert isinstance(caught.value, CallQueueError)
        assert "hunter2" not in str(caught.value)

    def test_keeps_the_error_of_a_callable_to_itself(self) -> None:
        def vault() -> str:
            raise RuntimeError("token hunter2 has expired")

        with pytest.raises(SecretError, match="'VAULT': its callable raised RuntimeError") as caught:
            resolve({"a": {"$secret": "VAULT"}}, {"VAULT": vault})
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None

    @pytest.mark.parametrize(
        ("value", "piece"),
        [
            ("Bearer abcdef123", "abcdef123"),
            ("https://hooks.example.com/services/T0/B0/xyz", "/services/T0/B0/xyz"),
            ("https://api.example.com/v1?key=abcdef123", "abcdef123"),
            ("https://api.example.com/v1?key=abcdef123", "/v1?key=abcdef123"),
            ("abcdef123\n", "abcdef123"),
        ],
    )
    def test_knows_the_parts_that_are_as_secret(self, value: str, piece: str) -> None:
        _, values = resolve({"$secret": "A"}, {"A": value})
        assert value in values
        assert piece in values

    def test_knows_the_pair_of_basic_authentication(self) -> None:
        _, values = resolve({"auth": ["me", {"$secret": "A"}]}, {"A": "abc"})
        assert values == ("me:abc", "abc")
        assert scrub(f"Basic {b64encode(b'me:abc').decode()}", values) == "Basic [secret]"


@pytest.mark.parametrize(
    ("params", "expected"),
    [({"a": [1, {"b": ({"$secret": "A"},)}]}, True), ({"$secret": "A"}, True), ({"a": ["$secret"]}, False), (5, False)],
)
def test_references_are_seen_anywhere(params: Any, expected: bool) -> None:
    assert has_secret(params) is expected


ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "quoted": quote,
    "quoted fully": lambda v: quote(v, safe=""),
    "quoted for a form": quote_plus,
    "quoted in lower case": lambda v: "".join(c if c.isalnum() else quote(c, safe="").lower() for c in v),
    "quoted twice": lambda v: quote(quote(v, safe=""), safe=""),
    "json": lambda v: json.dumps(v)[1:-1],
    "json, not ascii": lambda v: json.dumps(v, ensure_ascii=False)[1:-1],
    "json with escaped slashes": lambda v: json.dumps(v)[1:-1].replace("/", "\\/"),
    "json in json": lambda v: json.dumps(json.dumps(v)[1:-1])[1:-1],
    "repr": lambda v: repr(v)[1:-1],
    "repr of bytes": lambda v: repr(v.encode())[2:-1],
    "html": html.escape,
    "html, decimal": lambda v: "".join(c if c.isalnum() and c.isascii() else f"&#{ord(c)};" for c in v),
    "html, hexadecimal": lambda v: "".join(c if c.isalnum() and c.isascii() else f"&#x{ord(c):X};" for c in v),
    "utf-8 read as latin-1": lambda v: v.encode().decode("latin-1"),
    "base64": lambda v: b64encode(v.encode()).decode(),
    "base64 for urls": lambda v: urlsafe_b64encode(v.encode()).decode(),
    "base64 in a url": lambda v: quote(b64encode(v.encode()).decode(), safe=""),
}


class TestScrub:
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize("value", [KEY, "plainAlnum123", "a b/c?d", "<&>\"'\\", "-----BEGIN\nKEY\n-----", "pä§😀wörd"])
    def test_finds_a_value_in_every_usual_encoding(self, encoding: str, value: str) -> None:
        seen = ENCODINGS[encoding](value)
        assert scrub(f'{{"echo": "{seen}", "n": 1}}', (value,)) == '{"echo": "[secret]", "n": 1}'

    @pytest.mark.parametrize("user", ["", "u", "us", "use", "user"])
    def test_finds_the_password_of_basic_authentication_whatever_the_user(self, user: str) -> None:
        encoded = b64encode(f"{user}:correct-horse-battery".encode()).decode()
        left = scrub(encoded, ("correct-horse-battery",))
        assert "[secret]" in left
        assert len(left.replace("[secret]", "")) <= len(user) + 8

    def test_works_on_bytes(self) -> None:
        assert scrub(b"\xff \xc3\xa9t\xc3\xa9! \x00", ("été!",)) == b"\xff [secret] \x00"
        assert scrub("été!".encode("latin-1"), ("été!",)) == b"[secret]"

    def test_takes_the_longer_value_first(self) -> None:
        assert scrub("abcdefgh abcd", ("abcd", "abcdefgh")) == "[secret] [secret]"

    def test_takes_a_short_value_only_where_it_stands_alone(self) -> None:
        assert scrub("id=42&n=1429 (42) x42 42_a", ("42",)) == "id=[secret]&n=1429 ([secret]) x42 [secret]_a"
        assert scrub("a 12345 b", ("1234",)) == "a [secret]5 b"

    def test_leaves_everything_else(self) -> None:
        assert scrub("nothing here", ("secret-value",)) == "nothing here"
        assert scrub("nothing here", ()) == "nothing here"
        assert scrub("nothing here", ("",)) == "nothing here"
        assert scrub("", ("abcd",)) == ""

    def test_takes_characters_literally(self) -> None:
        assert scrub("aXbc a.b*c", ("a.b*c",)) == "aXbc [secret]"

    def test_reaches_into_json(self) -> None:
        body = {"echo": ["my-secret-1", {"my-secret-1": 5}], "n": None}
        assert scrub_json(body, ("my-secret-1",)) == {"echo": ["[secret]", {"[secret]": 5}], "n": None}
        assert scrub_json(body, ()) == body

    @pytest.mark.parametrize("flood", ["\\", "%25", "&#0", "%2", "/", "\\\\u00"])
    def test_takes_linear_time_on_hostile_answers(self, flood: str) -> None:
        began = time.perf_counter()
        scrub(flood * 200_000, ("/\\/ secret%&", "\\" * 30 + "x\\\\y"))
        assert time.perf_counter() - began < 5

    def test_is_quick_on_a_long_key(self) -> None:
        key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC+/\n" * 50
        assert scrub(json.dumps({"k": key}), (key,)) == '{"k": "[secret]"}'

    @settings(max_examples=150, deadline=None)
    @given(st.text(min_size=4, max_size=20).filter(str.strip), st.sampled_from(sorted(ENCODINGS)), st.text(max_size=5))
    def test_leaves_no_value_in_any_encoding(self, value: str, encoding: str, around: str) -> None:
        try:
            seen = ENCODINGS[encoding](value)
        except UnicodeEncodeError:
            return
        scrubbed = scrub(f"{around} {seen} {around}", (value,))
        assert "[secret]" in scrubbed
        assert seen not in scrubbed.replace("[secret]", "\U0010ffff")
