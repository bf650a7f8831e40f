"""What people are shown never holds what is probably secret."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.security.redaction import (
    REDACTED,
    is_telling,
    redact_headers,
    redact_params,
    redact_text,
    redact_url,
)
from callqueue.security.secrets import Secret
from tests.support.length import examples

PASSWORD = "hunter2-hunter2"
URL = "https://api.example.com/v1"


@pytest.mark.parametrize(
    "name",
    ["Authorization", "proxy-authorization", "COOKIE", "Set-Cookie", "X-Api-Key", "Api-Key", "X-Auth-Token",
     "X-Amz-Security-Token", "X-Amz-Signature", "access_token", "client_secret", "userPassword", "passwd", "apikey",
     "api_key", "credentials", "sessionid", "auth", "pwd", "private_key", "aws_access_key_id"],
)  # fmt: skip
def test_names_that_tell(name: str) -> None:
    for other in ("Accept", "Content-Type", "X-Request-Id", "amount", "author", "keyboard", 5):
        assert not is_telling(other)
        assert redact_headers({other: "text/html"}) == {str(other): "text/html"}
    assert is_telling(name)
    assert redact_headers({name: PASSWORD}) == {name: REDACTED}
    assert redact_params({"json": {"a": [{name: PASSWORD}]}}) == {"json": {"a": [{name: REDACTED}]}}
    assert redact_params({"data": [[name, PASSWORD]]}) == {"data": [[name, REDACTED]]}
    assert PASSWORD not in redact_url(f"{URL}?{name}={PASSWORD}&page=2")
    assert PASSWORD not in redact_text(f'bad answer: {{"x": 1, "{name}": "{PASSWORD}", "y"')


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, URL),
        (f"{URL}?page=2&q=a", f"{URL}?page=2&q=a"),
        (f"https://user:{PASSWORD}@example.com/", "https://[redacted]@example.com/"),
        (f"https://{PASSWORD}@example.com/", "https://[redacted]@example.com/"),
        (f"{URL}?p=2&key={PASSWORD}&sig={PASSWORD}", f"{URL}?p=2&key=[redacted]&sig=[redacted]"),
        (f"{URL}?token={PASSWORD}#token={PASSWORD}", f"{URL}?token=[redacted]#token=[redacted]"),
        (f"{URL}?auth%5Ftoken={PASSWORD}", f"{URL}?auth%5Ftoken=[redacted]"),
        (Secret("HOOK"), Secret("HOOK")),
        (None, None),
    ],
)
def test_a_url_keeps_all_but_its_secrets(url: Any, shown: Any) -> None:
    assert redact_url(url) == shown


NESTED: Any = [PASSWORD]
for _ in range(5000):
    NESTED = [NESTED]
R = REDACTED


@pytest.mark.parametrize(
    ("place", "value", "shown"),
    [
        ("url", f"{URL}?token={PASSWORD}", f"{URL}?token={R}"),
        ("headers", {"Authorization": PASSWORD, "X-Info": f"Bearer {PASSWORD}", "Accept": "*/*"},
         {"Authorization": R, "X-Info": f"Bearer {R}", "Accept": "*/*"}),
        ("headers", {"Authorization": Secret("A")}, {"Authorization": "[secret A]"}),
        ("cookies", {"theme": PASSWORD, "sid": Secret("SID")}, {"theme": R, "sid": "[secret SID]"}),
        # a user without a password is a key
        ("auth", ["user", PASSWORD], ["user", R]),
        ("auth", ["sk_live_1", ""], [R, ""]),
        ("auth", ["user", Secret("PW")], ["user", "[secret PW]"]),
        ("auth", [Secret("KEY"), ""], ["[secret KEY]", ""]),
        ("auth", PASSWORD, R),
        ("auth", Secret("KEY"), "[secret KEY]"),
        ("auth", [5, 6], [R, R]),
        ("params", {"key": PASSWORD, "q": "a", "token": [PASSWORD]}, {"key": R, "q": "a", "token": R}),
        ("data", {"key": PASSWORD, "q": "a"}, {"key": R, "q": "a"}),
        ("cookies", {"theme": "", "n": 5}, {"theme": R, "n": R}),
        ("json", {"max_tokens": 100, "token": 5, "password": "", "key": "shown", "reset_password": True},
         {"max_tokens": 100, "token": R, "password": "", "key": "shown", "reset_password": True}),
        ("json", {"token": [Secret("B")], "x": Secret("C")}, {"token": R, "x": "[secret C]"}),
        ("json", {"token": {"$secret": PASSWORD}}, {"token": R}),
        ("data", f"user=a&password={PASSWORD}", f"user=a&password={R}"),
        ("data", json.dumps({"password": [PASSWORD], "e": 1}), json.dumps({"password": R, "e": 1})),
        ("kwargs", {"api_key": PASSWORD}, {"api_key": R}),
        ("message", f"reset: {URL}/reset?token={PASSWORD}", f"reset: {URL}/reset?token={R}"),
    ],
)  # fmt: skip
def test_params_are_redacted_by_place_and_references_are_named(
    place: str, value: Any, shown: Any
) -> None:
    redacted = redact_params({place: value})[place]
    assert redacted == shown or json.loads(redacted) == json.loads(shown)


@pytest.mark.parametrize(
    "params",
    [None, [], "text", 5, {"headers": 5, "cookies": [1], "auth": {}, "url": [None]}, {"json": NESTED}],
)  # fmt: skip
def test_params_may_be_malformed_or_absurdly_deep(params: Any) -> None:
    assert PASSWORD not in str(redact_params(params))


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {PASSWORD}",
        f"sent with Bearer {PASSWORD} to",
        f"sent with basic {PASSWORD} to",
        f"Bearer\t{PASSWORD}",
        f"GET https://me:{PASSWORD}@example.com/ failed",
        f"Max retries exceeded with url: /v1?api_key={PASSWORD}&x=1 (Caused by",
        f"{{'password': '{PASSWORD}'}}",
        f'{{"password" : "{PASSWORD}',
        f'{{"body": "{{\\"password\\": \\"{PASSWORD}\\"}}"}}',
        f"a: b\r\nSet-Cookie: a={PASSWORD}; Path=/\r\nc: d",
        f"password={PASSWORD};",
        f'"token": "a\\"{PASSWORD}"',
    ],
)
def test_a_text_loses_its_secrets(text: str) -> None:
    shown = redact_text(text)
    assert PASSWORD not in shown
    assert REDACTED in shown


@pytest.mark.parametrize(
    "text",
    ["", "nothing to hide", "basic functionality is missing", "Token expired at noon", '{"max_tokens": 5}',
     "HTTP 429: slow down; page=2", 'WWW-Authenticate: Bearer realm="x"'],
)  # fmt: skip
def test_a_text_keeps_the_rest(text: str) -> None:
    assert redact_text(text) == text


FLOODS = [
    "a",
    "a=",
    '"',
    '\\"',
    "a:",
    "Bearer ",
    "http://",
    "%5B",
    "{",
    '"password":"',
    "\n ",
    "a:a",
]


@pytest.mark.parametrize("flood", FLOODS)
def test_a_text_takes_linear_time(flood: str) -> None:
    began = time.perf_counter()
    redact_text(flood * (300_000 // len(flood)))
    redact_url(flood * (300_000 // len(flood)))
    assert time.perf_counter() - began < 10


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)
places = st.sampled_from("url headers cookies auth params data json x $secret".split())  # noqa: SIM905


@settings(max_examples=examples(60, 200), deadline=None)
@given(json_values | st.dictionaries(places, json_values))
def test_nothing_makes_redaction_raise(value: Any) -> None:
    redact_params(value)
    redact_headers(value)
    redact_url(value)
