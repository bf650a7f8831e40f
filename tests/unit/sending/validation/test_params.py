"""What an HTTP call and a mail may say: what is refused, by its field, and why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.samples import checked, email, http, refused

HTTP: list[tuple[dict[str, Any], str, str]] = [
    ({"timeout": None}, "timeout", "total_timeout"),
    ({"verify": None}, "verify", "Rule(verify=...)"),
    ({"stream": None}, "stream", "MAX_RESPONSE_BYTES"),
    ({"proxies": None}, "proxies", "not offered"),
    ({"cert": None}, "cert", "not offered"),
    ({"allow_redirects": None}, "allow_redirects", "Location"),
    ({"hooks": None}, "hooks", "classify"),
    ({"files": None}, "files", "not offered"),
    ({"header": None}, "header", "did you mean 'headers'?"),
    ({"json": {}, "data": "x"}, "data", "one body"),
    ({"headers": [["a", "b"]]}, "headers", "must be a dict"),
    ({"headers": {"X-A": 1}}, "headers.X-A", "must be a string"),
    ({"headers": {"X-A": "a\r\nB: c"}}, "headers.X-A", "line break"),
    ({"headers": {"X-A": "a\n"}}, "headers.X-A", "line break"),
    ({"headers": {"X-A": "\x1b"}}, "headers.X-A", "control"),
    ({"headers": {"X-A": " a"}}, "headers.X-A", "white space"),
    ({"headers": {"X-A": "a "}}, "headers.X-A", "white space"),
    ({"headers": {"X-A": "a\t"}}, "headers.X-A", "white space"),
    ({"headers": {"X-A": "€"}}, "headers.X-A", "Latin-1"),
    ({"headers": {"X A": "a"}}, "headers", "not a header's name"),
    ({"headers": {"X:": "a"}}, "headers", "not a header's name"),
    ({"headers": {"": "a"}}, "headers", "not a header's name"),
    ({"headers": {"é": "a"}}, "headers", "not a header's name"),
    ({"headers": {"X\r\nY": "a"}}, "headers", "not a header's name"),
    ({"headers": {"Host": "evil"}}, "headers.Host", "leave it out"),
    ({"headers": {"content-LENGTH": "5"}}, "headers.content-LENGTH", "leave it out"),
    ({"headers": {"Transfer-Encoding": "chunked"}}, "headers.Transfer-Encoding", "leave it out"),
    ({"headers": {"Connection": "close"}}, "headers.Connection", "leave it out"),
    ({"headers": {"X-A": "1", "x-a": "2"}}, "headers.x-a", "given twice"),
    ({"cookies": ["a"]}, "cookies", "must be a dict"),
    ({"cookies": {"a": 1}}, "cookies.a", "must be a string"),
    ({"cookies": {"a": "b; c=d"}}, "cookies.a", "';'"),
    ({"cookies": {"a": "b\r\n"}}, "cookies.a", "line break"),
    ({"cookies": {"a": "€"}}, "cookies.a", "Latin-1"),
    ({"cookies": {"a=": "b"}}, "cookies", "not a cookie's name"),
    ({"auth": "user:pass"}, "auth", "[user, password]"),
    ({"auth": ["user"]}, "auth", "[user, password]"),
    ({"auth": ["a", "b", "c"]}, "auth", "[user, password]"),
    ({"auth": {"user": "a"}}, "auth", "[user, password]"),
    ({"auth": ["user", 1]}, "auth[1]", "must be a string"),
    ({"auth": [None, "x"]}, "auth[0]", "must be a string"),
    ({"auth": ["us:er", "x"]}, "auth[0]", "':'"),
    ({"auth": ["user", "x\r\n"]}, "auth[1]", "line break"),
    ({"auth": ["user", "€"]}, "auth[1]", "Latin-1"),
]
FIELDS: list[tuple[Any, str, str]] = [
    (5, "", "a list of pairs, not a number"),
    (True, "", "a list of pairs, not a boolean"),
    ({"a": {"b": 1}}, ".a", "use params.json"),
    ({"a": [[1]]}, ".a[0]", "is nested"),
    ({"a": [1, {"b": 1}]}, ".a[1]", "is nested"),
    ([["a"]], "[0]", "must be a pair"),
    ([["a", 1, 2]], "[0]", "must be a pair"),
    ([[1, 2]], "[0]", "must be a pair"),
    (["ab"], "[0]", "must be a pair"),
    ([["a", {"b": 1}]], "[0][1]", "use params.json"),
]
EMAIL: list[tuple[dict[str, Any], str, str]] = [
    ({"to": None}, "to", "is missing"),
    ({"to": ""}, "to", "is missing"),
    ({"to": []}, "to", "is missing"),
    ({"to": [""]}, "to[0]", "must be an address"),
    ({"to": ["a@example.com", 5]}, "to[1]", "must be an address"),
    ({"to": {"a": 1}}, "to", "must be a list"),
    ({"to": "a@example.com\nBcc: x"}, "to", "line break"),
    ({"cc": ["a\r"]}, "cc[0]", "line break"),
    ({"reply_to": "a\u2028b"}, "reply_to", "line break"),
    ({"subject": "a\nBcc: b"}, "subject", "line break"),
    ({"from_email": "a\r\nb"}, "from_email", "line break"),
    ({"subject": 5}, "subject", "must be a string"),
    ({"message": ["x"]}, "message", "must be a string"),
    ({"html": "x"}, "html", "html_message"),
]


@pytest.mark.parametrize(("params", "field", "why"), HTTP)
def test_an_http_call_is_refused_with_its_field(
    params: dict[str, Any], field: str, why: str
) -> None:
    refused(http(**params), f"params.{field}", why)


@pytest.mark.parametrize("place", ["params", "data"])
@pytest.mark.parametrize(("value", "path", "why"), FIELDS)
def test_a_query_or_a_form_that_cannot_be_written_is_refused(
    place: str, value: Any, path: str, why: str
) -> None:
    refused(http(**{place: value}), f"params.{place}{path}", why)


@pytest.mark.parametrize(("params", "field", "why"), EMAIL)
def test_a_mail_is_refused_with_its_field(params: dict[str, Any], field: str, why: str) -> None:
    refused(email(**params), f"params.{field}", why)


def test_a_mail_goes_to_one_or_several() -> None:
    checked(email(to=["a@example.com", "B <b@example.com>"], cc="c@example.com", bcc=[], reply_to=None,
                  from_email="me@example.com", html_message="<p>\n</p>", message="a\nb"))  # fmt: skip


def test_an_empty_body_is_none() -> None:
    checked(http(json={}, data=""))
