"""What an HTTP call, a mail and a task may say; what is refused, by its field, and why."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue.security.secrets import Secret
from tests.support.samples import checked, email, http, refused, task

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
    ({"headers": {"X-A": "\x1b"}}, "headers.X-A", "control"),
    ({"headers": {"X-A": " a"}}, "headers.X-A", "white space"),
    ({"headers": {"X-A": "a\t"}}, "headers.X-A", "white space"),
    ({"headers": {"X-A": "€"}}, "headers.X-A", "Latin-1"),
    ({"headers": {"X A": "a"}}, "headers", "not a header's name"),
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
    ({"auth": {"user": "a"}}, "auth", "[user, password]"),
    ({"auth": ["user", 1]}, "auth[1]", "must be a string"),
    ({"auth": ["us:er", "x"]}, "auth[0]", "':'"),
    ({"auth": ["user", "x\r\n"]}, "auth[1]", "line break"),
    ({"auth": ["user", "€"]}, "auth[1]", "Latin-1"),
]
FIELDS: list[tuple[Any, str, str]] = [
    (5, "", "a list of pairs, not a number"),
    ({"a": {"b": 1}}, ".a", "use params.json"),
    ({"a": [[1]]}, ".a[0]", "is nested"),
    ({"a": [1, {"b": 1}]}, ".a[1]", "is nested"),
    ([["a"]], "[0]", "must be a pair"),
    (["ab"], "[0]", "must be a pair"),
    ([["a", {"b": 1}]], "[0][1]", "use params.json"),
]
EMAIL: list[tuple[dict[str, Any], str, str]] = [
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


TASK: list[tuple[dict[str, Any], str, str]] = [
    ({"name": ""}, "name", ""),
    ({"name": "a b"}, "name", ""),
    ({"args": {}}, "args", ""),
    ({"kwargs": [1]}, "kwargs", ""),
    ({"kwargs": Secret("STRIPE")}, "kwargs", ""),
    ({"countdown": 5}, "countdown", ""),
    ({"headers": ["id"]}, "headers", ""),
    ({"headers": {"id": 7}}, "headers.id", ""),
    ({"embed": "chain"}, "embed", ""),
]
MADE = [
    *[(http, *row) for row in HTTP],
    *[(http, {place: value}, place + path, why) for place in ("params", "data") for value, path, why in FIELDS],
    *[(email, *row) for row in EMAIL],
    *[(task, *row) for row in TASK],
]  # fmt: skip


@pytest.mark.parametrize(("make", "params", "field", "why"), MADE)
def test_what_cannot_be_sent_is_refused_with_its_field(
    make: Any, params: dict[str, Any], field: str, why: str
) -> None:
    refused(make(**params), f"params.{field}", why)


S = Secret("STRIPE")


@pytest.mark.parametrize(
    ("make", "params"),
    [
        (http, {"params": {"q": ["a", "b", S], "n": 1, "skip": None}}),
        (http, {"params": "a=b"}),
        (http, {"params": [["a", 1], ["a", 2]]}),
        (http, {"data": "raw text"}),
        (http, {"data": {"a": "b"}}),
        (http, {"data": [["a", "b"], ["a", S]]}),
        (http, dict.fromkeys(("json", "data", "headers", "cookies", "auth", "params"))),
        (http, {"json": "text"}),
        (http, {"json": 0, "data": None}),
        (http, {"json": {}, "data": ""}),
        (http, {"json": {"big": 10**400}}),
        (http, {"cookies": {"session": "a b,c"}}),
        (http, {"auth": ["user", "pass:word"]}),
        (http, {"auth": ("user", S)}),
        (http, {"headers": {"Authorization": S, "X-Empty": "", "X-Tab": "a\tb"}}),
        (email, {"to": ["a@example.com", "B <b@example.com>"], "cc": "c@example.com", "bcc": [], "reply_to": None}),
        (email, {"from_email": "me@example.com", "html_message": "<p>\n</p>", "message": "a\nb"}),
        (email, {"to": [S], "subject": S, "message": S, "reply_to": S}),
        (task, {"args": [1, {"a": 2}], "kwargs": {"b": 3}}),
        (task, {"args": (1,), "kwargs": None}),
        (task, {"name": S, "args": [S]}),
    ],
)  # fmt: skip
def test_what_can_be_sent_is_accepted(make: Any, params: dict[str, Any]) -> None:
    checked(make(**params))
