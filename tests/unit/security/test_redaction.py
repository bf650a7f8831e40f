"""What people are shown never holds what is probably secret, and curl commands are safe to
paste.
"""

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
    assert is_telling(name)
    assert redact_headers({name: PASSWORD}) == {name: REDACTED}
    assert redact_params({"json": {"a": [{name: PASSWORD}]}}) == {"json": {"a": [{name: REDACTED}]}}
    assert redact_params({"data": [[name, PASSWORD]]}) == {"data": [[name, REDACTED]]}
    assert PASSWORD not in redact_url(f"{URL}?{name}={PASSWORD}&page=2")
    assert PASSWORD not in redact_text(f'bad answer: {{"x": 1, "{name}": "{PASSWORD}", "y"')


@pytest.mark.parametrize(
    "name", ["Accept", "Content-Type", "X-Request-Id", "amount", "author", "keyboard", 5]
)
def test_names_that_do_not(name: Any) -> None:
    assert not is_telling(name)
    assert redact_headers({name: "text/html"}) == {str(name): "text/html"}


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            (URL, URL),
            (f"{URL}?page=2&q=a", f"{URL}?page=2&q=a"),
            (f"https://user:{PASSWORD}@example.com/", "https://[redacted]@example.com/"),
            (f"https://{PASSWORD}@example.com/", "https://[redacted]@example.com/"),
            (
                f"{URL}?page=2&key={PASSWORD}&sig={PASSWORD}",
                f"{URL}?page=2&key=[redacted]&sig=[redacted]",
            ),
            (
                f"{URL}?access_token={PASSWORD}#token={PASSWORD}",
                f"{URL}?access_token=[redacted]#token=[redacted]",
            ),
            (f"{URL}?auth%5Ftoken={PASSWORD}", f"{URL}?auth%5Ftoken=[redacted]"),
            (Secret("HOOK"), Secret("HOOK")),
            (None, None),
        ],
    )
    def test_keep_all_but_the_secrets(self, url: Any, shown: Any) -> None:
        assert redact_url(url) == shown


class TestParams:
    def test_are_redacted_by_place(self) -> None:
        shown = redact_params({
            "url": f"{URL}?token={PASSWORD}",
            "headers": {"Authorization": PASSWORD, "X-Info": f"Bearer {PASSWORD}", "Accept": "*/*"},
            "cookies": {"theme": PASSWORD, "sid": Secret("SID")},
            "auth": ["user", PASSWORD],
            "params": {"key": PASSWORD, "q": "a", "token": [PASSWORD]},
            "json": {"max_tokens": 100, "token": 5, "password": "", "key": "shown", "reset_password": True},
        })  # fmt: skip
        assert shown == {
            "url": f"{URL}?token={REDACTED}",
            "headers": {"Authorization": REDACTED, "X-Info": f"Bearer {REDACTED}", "Accept": "*/*"},
            "cookies": {"theme": REDACTED, "sid": "[secret SID]"},
            "auth": ["user", REDACTED],
            "params": {"key": REDACTED, "q": "a", "token": REDACTED},
            "json": {
                "max_tokens": 100,
                "token": REDACTED,
                "password": "",
                "key": "shown",
                "reset_password": True,
            },
        }

    @pytest.mark.parametrize(
        ("auth", "shown"),
        [
            (["sk_live_1", ""], [REDACTED, ""]),
            (["user", Secret("PW")], ["user", "[secret PW]"]),
            ([Secret("KEY"), ""], ["[secret KEY]", ""]),
            (PASSWORD, REDACTED),
            (Secret("KEY"), "[secret KEY]"),
            ([5, 6], [REDACTED, REDACTED]),
        ],
    )
    def test_treat_a_user_without_a_password_as_a_key(self, auth: Any, shown: Any) -> None:
        assert redact_params({"auth": auth}) == {"auth": shown}

    def test_keep_references(self) -> None:
        params = {
            "headers": {"Authorization": Secret("A")},
            "json": {"token": [Secret("B")], "x": Secret("C")},
        }
        shown = {
            "headers": {"Authorization": "[secret A]"},
            "json": {"token": REDACTED, "x": "[secret C]"},
        }
        assert redact_params(params) == shown

    def test_redact_data_that_looks_like_one(self) -> None:
        assert redact_params({"json": {"token": {"$secret": PASSWORD}}}) == {
            "json": {"token": REDACTED}
        }

    def test_read_bodies_that_are_text(self) -> None:
        assert redact_params({"data": f"user=a&password={PASSWORD}"}) == {
            "data": f"user=a&password={REDACTED}"
        }
        shown = redact_params({"data": json.dumps({"password": [PASSWORD], "é": 1})})["data"]
        assert json.loads(shown) == {"password": REDACTED, "é": 1}

    def test_are_redacted_for_every_method(self) -> None:
        assert redact_params({"name": "t", "kwargs": {"api_key": PASSWORD}})["kwargs"] == {
            "api_key": REDACTED
        }
        link = f"reset: {URL}/reset?token={PASSWORD}"
        assert PASSWORD not in redact_params({"to": "a@example.com", "message": link})["message"]

    @pytest.mark.parametrize(
        "params", [None, [], "text", 5, {"headers": 5, "cookies": [1], "auth": {}, "url": [None]}]
    )
    def test_may_be_malformed(self, params: Any) -> None:
        redact_params(params)

    def test_may_be_absurdly_deep(self) -> None:
        nested: Any = PASSWORD
        for _ in range(5000):
            nested = [nested]
        assert PASSWORD not in str(redact_params({"json": nested}))


class TestText:
    @pytest.mark.parametrize(
        "text",
        [
            f"Authorization: Bearer {PASSWORD}",
            f"sent with Bearer {PASSWORD} to",
            f"sent with basic {PASSWORD} to",
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
    def test_loses_its_secrets(self, text: str) -> None:
        shown = redact_text(text)
        assert PASSWORD not in shown
        assert REDACTED in shown

    @pytest.mark.parametrize(
        "text",
        ["", "nothing to hide", "basic functionality is missing", "Token expired at noon", '{"max_tokens": 5}',
         "HTTP 429: slow down; page=2", 'WWW-Authenticate: Bearer realm="x"'],
    )  # fmt: skip
    def test_keeps_the_rest(self, text: str) -> None:
        assert redact_text(text) == text

    @pytest.mark.parametrize(
        "flood",
        [
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
        ],
    )
    def test_takes_linear_time(self, flood: str) -> None:
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
places = st.sampled_from(
    ["url", "headers", "cookies", "auth", "params", "data", "json", "x", "$secret"]
)


@settings(max_examples=examples(60, 200), deadline=None)
@given(json_values | st.dictionaries(places, json_values))
def test_nothing_makes_redaction_raise(value: Any) -> None:
    redact_params(value)
    redact_headers(value)
    redact_url(value)
