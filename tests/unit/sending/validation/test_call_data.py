"""call_data: what comes back of it, and what is refused by its field."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from datetime import date, timedelta
from decimal import Decimal
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security import addresses
from callqueue.security.secrets import Secret, mark_secrets, unmark_secrets
from callqueue.sending.call_data import Reach, check_params, check_url
from tests.support import samples
from tests.support.length import examples
from tests.support.samples import (
    ANYWHERE,
    NOW,
    URL,
    call_datas,
    checked,
    email,
    http,
    refused,
    task,
)


def test_a_good_call_comes_back_as_a_plain_copy() -> None:
    class Text(str):
        pass

    class Colour(IntEnum):
        RED = 3

    class Point(NamedTuple):
        x: int
        y: int

    call = http(json={"a": (1, 2.5, None, True)}, headers={"X-Trace": "é"})
    result = checked(call)
    assert result == http(json={"a": [1, 2.5, None, True]}, headers={"X-Trace": "é"})
    assert result is not call
    assert result["params"]["json"] is not call["params"]["json"]
    given = OrderedDict([(Text("a"), Text("b")), ("c", Colour.RED), ("p", Point(1, 2))])
    plain = checked(http(json=given))["params"]["json"]
    assert plain == {"a": "b", "c": 3, "p": [1, 2]}
    assert (type(plain["a"]), type(plain["c"])) == (str, int)


@pytest.mark.parametrize(
    "method",
    ["get", "options", "head", "post", "put", "patch", "delete", "GET", "Patch", "Fax", "SMS"],
)
def test_a_method_is_known_in_any_case(method: str) -> None:
    assert checked({"method": method, "params": {"url": URL}})["method"] == method.lower()


SHAPES: list[tuple[Any, str, str]] = [
    *[(wrong, "call_data", "must be a dict") for wrong in ("{}", None, [], 3, b"{}", MappingProxyType({}))],
    ({**http(), "parms": {}}, "call_data.parms", "did you mean 'params'?"),
    ({"method": "get", "url": URL, "params": {}}, "call_data.url", "belongs into params"),
    ({"params": {}}, "method", "is missing"),
    ({"method": "", "params": {}}, "method", "is missing"),
    ({"method": 7, "params": {}}, "method", "must be a string"),
    ({"method": ["get"], "params": {}}, "method", "must be a string"),
    ({"method": "pots", "params": {}}, "method", "did you mean 'post'?"),
    ({"method": "send-email", "params": {}}, "method", "did you mean 'send_email'?"),
    ({"method": "Permit", "params": {}}, "method", "take a permit with callqueue.permit()"),
    ({"method": "get"}, "params", "is missing"),
    ({"method": "get", "params": None}, "params", "must be a dict"),
    ({"method": "get", "params": [1]}, "params", "must be a dict"),
    ({"method": "sms", "params": "text"}, "params", "must be a dict"),
    ({"method": "sms", "params": Secret("STRIPE")}, "params", "inside params"),
    ({1: 2}, "call_data", "key that is not a string"),
    (http(headers=Secret("STRIPE")), "params.headers", "not a secret"),
    (http(cookies=Secret("STRIPE")), "params.cookies", "not a secret"),
    (http(headers={"X-A": {"$secret": "STRIPE"}}), "params.headers.X-A", "callqueue.Secret(NAME)"),
    (http(auth=["u", {"$secret": "STRIPE"}]), "params.auth[1]", "callqueue.Secret(NAME)"),
    (http(json={"a": Secret("STRIP")}), "params.json.a", "not in SECRETS: 'STRIP'"),
    (http(json={"a": Secret("A\nB")}), "params.json.a", r"not in SECRETS: 'A\nB'"),
    (http(json={"a": Secret("\ud800")}), "params.json.a", "half of a surrogate pair"),
    *[(http(json={"a": [{key: 1}]}), "params.json.a[0]", "key that is not a string") for key in (1, None, 1.5, (1, 2), b"k")],
    (http(json={"a": {"a\0": 1}}), "params.json.a", "NUL"),
    (http(json={"a": {"\udfff": 1}}), "params.json.a", "surrogate"),
    (http(json=[10**4300]), "params.json[0]", "digits"),
    (http(json=[-(10**4300)]), "params.json[0]", "digits"),
]  # fmt: skip
NO_JSON: list[tuple[Any, str]] = [
    (math.nan, "NaN"),
    (math.inf, "Infinity"),
    (-math.inf, "Infinity"),
    (float("1e400"), "finite"),
    (b"bytes", "base64"),
    (bytearray(b"bytes"), "base64"),
    (NOW, "isoformat"),
    (date(2030, 1, 1), "isoformat"),
    (timedelta(1), "total_seconds"),
    ({1, 2}, "sorted list"),
    (frozenset(), "sorted list"),
    (MappingProxyType({}), "dict(...)"),
    (Decimal("1.5"), "Decimal"),
    (UUID(int=1), "UUID"),
    (object(), "object"),
    (1j, "complex"),
    ("a\0b", "NUL"),
    ("\ud800", "surrogate"),
    (len, "not JSON"),
]


@pytest.mark.parametrize(
    ("call_data", "field", "why"),
    [
        *SHAPES,
        *[
            (http(json={"i": [0, 1, {"p": one}]}), "params.json.i[2].p", why)
            for one, why in NO_JSON
        ],
    ],
)
def test_what_is_wrong_is_named_by_its_place(call_data: Any, field: str, why: str) -> None:
    """And no name of a secret but the one that was asked for."""
    said = refused(call_data, field, why)
    assert "GITHUB" not in said and "STRIPE" not in said


def test_a_key_is_shown_escaped_and_short() -> None:
    with pytest.raises(InvalidCall) as caught:
        checked(http(json={"a\r\n" + "b" * 500: math.nan}))
    assert "\n" not in caught.value.field
    assert len(caught.value.field) < 80


def test_a_secret_is_checked_again_once_it_is_resolved() -> None:
    checked({"method": "get", "params": {"url": Secret("STRIPE")}}, allowed_hosts=())
    with pytest.raises(InvalidCall, match="line break"):
        check_params("get", {"url": URL, "headers": {"Authorization": "x\n"}}, ANYWHERE)


# --- What JSON has too many words for


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels - 1):
        nested = [nested]
    return nested


def test_nothing_nests_deeper_than_64_and_nothing_unfolds_without_end() -> None:
    checked({"method": "sms", "params": {"a": deep(62)}})
    loop, laughs = list[Any](), list[Any](["ha"])
    loop.append(loop)
    for nested in (deep(63), deep(100_000), loop):
        with pytest.raises(InvalidCall, match=r"^params\.a\[0\].*: is nested deeper than 64"):
            checked({"method": "sms", "params": {"a": nested}})
    for _ in range(40):
        laughs = [laughs, laughs]
    more = "more than 1048576 bytes of JSON; MAX_CALL_BYTES is 262144"
    refused(http(json=laughs), "call_data", more)
    checked(http(json=[10**4299]))
    refused(http(json=[10**4299] * 100_000), "call_data", "more than")  # without writing them


NUMBERS = {"a": [1] * 50, "b": {"": 1, "c": 10**30}, "d": [[], {}, "", 0.5, None]}


@pytest.mark.parametrize("call", [http(json="é" * 100), {"method": "sms", "params": NUMBERS}])
def test_a_call_is_measured_exactly_in_bytes_of_utf8(call: Any) -> None:
    size = len(json.dumps(call, ensure_ascii=False, separators=(",", ":")).encode())
    assert checked(call, max_bytes=size) == call
    assert str(size) in refused(call, "call_data", max_bytes=size - 1)


@settings(max_examples=examples(100, 400), deadline=None)
@given(call_datas, st.integers(20, 400))
def test_whatever_is_given_is_accepted_as_json_or_refused_by_field(
    call_data: Any, max_bytes: int
) -> None:
    try:
        result = checked(call_data, max_bytes=max_bytes)
    except (InvalidCall, NotAllowed) as error:
        str(error).encode()
        assert "\n" not in str(error)
        return
    text = json.dumps(
        mark_secrets(result), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    assert unmark_secrets(json.loads(text)) == result
    assert len(text.encode()) <= max_bytes
    assert "\\u0000" not in json.dumps(mark_secrets(result)).replace("\\\\", "")
    assert checked(result, max_bytes=max_bytes) == result


# --- What an HTTP call, a mail and a task may say


HTTP: list[tuple[dict[str, Any], str, str]] = [
    ({"timeout": None}, "timeout", "total_timeout"),
    ({"verify": None}, "verify", "Rule(verify=...)"),
    ({"stream": None}, "stream", "MAX_RESPONSE_BYTES"),
    *[({name: None}, name, "not offered") for name in ("proxies", "cert", "files")],
    ({"allow_redirects": None}, "allow_redirects", "Location"),
    ({"hooks": None}, "hooks", "classify"),
    ({"header": None}, "header", "did you mean 'headers'?"),
    ({"json": {}, "data": "x"}, "data", "one body"),
    ({"headers": [["a", "b"]]}, "headers", "must be a dict"),
    ({"headers": {"X-A": 1}}, "headers.X-A", "must be a string"),
    ({"headers": {"X-A": "a\r\nB: c"}}, "headers.X-A", "line break"),
    ({"headers": {"X-A": "\x1b"}}, "headers.X-A", "control"),
    *[({"headers": {"X-A": value}}, "headers.X-A", "white space") for value in (" a", "a\t")],
    ({"headers": {"X-A": "€"}}, "headers.X-A", "Latin-1"),
    *[({"headers": {name: "a"}}, "headers", "not a header's name") for name in ("X A", "", "é", "X\r\nY")],
    *[
        ({"headers": {name: "5"}}, f"headers.{name}", "leave it out")
        for name in ("Host", "content-LENGTH", "Transfer-Encoding", "Connection")
    ],
    ({"headers": {"X-A": "1", "x-a": "2"}}, "headers.x-a", "given twice"),
    ({"cookies": ["a"]}, "cookies", "must be a dict"),
    ({"cookies": {"a": 1}}, "cookies.a", "must be a string"),
    ({"cookies": {"a": "b; c=d"}}, "cookies.a", "';'"),
    ({"cookies": {"a": "b\r\n"}}, "cookies.a", "line break"),
    ({"cookies": {"a": "€"}}, "cookies.a", "Latin-1"),
    ({"cookies": {"a=": "b"}}, "cookies", "not a cookie's name"),
    *[({"auth": auth}, "auth", "[user, password]") for auth in ("user:pass", ["user"], {"user": "a"})],
    ({"auth": ["user", 1]}, "auth[1]", "must be a string"),
    ({"auth": ["us:er", "x"]}, "auth[0]", "':'"),
    ({"auth": ["user", "x\r\n"]}, "auth[1]", "line break"),
    ({"auth": ["user", "€"]}, "auth[1]", "Latin-1"),
]  # fmt: skip
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
    ({"cc": ["a\r"]}, "cc[0]", "line break"),
    *[({name: "a\nBcc: x"}, name, "line break") for name in ("to", "reply_to", "subject", "from_email")],
    *[({name: ["x"]}, name, "must be a string") for name in ("subject", "message")],
    ({"html": "x"}, "html", "html_message"),
]  # fmt: skip
TASK: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "name"),
    ({"name": "a b"}, "name"),
    ({"args": {}}, "args"),
    ({"kwargs": [1]}, "kwargs"),
    ({"kwargs": Secret("STRIPE")}, "kwargs"),
    ({"countdown": 5}, "countdown"),
    ({"headers": ["id"]}, "headers"),
    ({"headers": {"id": 7}}, "headers.id"),
    ({"embed": "chain"}, "embed"),
]
MADE = [
    *[(http, *row) for row in HTTP],
    *[(http, {place: value}, place + path, why) for place in ("params", "data") for value, path, why in FIELDS],
    *[(email, *row) for row in EMAIL],
    *[(task, *row, "") for row in TASK],
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


# --- URLs that may be called, and those that no parser reads otherwise


WRONG: dict[str, list[Any]] = {
    "must be an http or https URL": [None, "", 5, {"a": 1}],
    "http://": [
        "ftp://example.com", "file:///etc/passwd", "javascript:alert(1)", "//example.com", "example.com",
        "http:/example.com", "http:example.com",
    ],
    "no host": ["http://", "http:///path", "http://?q", "http://:80/"],
    "auth": ["http://user:hunter2@example.com/", "http://user@example.com/", "http://@example.com/"],
    "backslash": ["http://example.com\\@evil.com/"],
    "white space": [
        "http://example.com/a b", " http://example.com/", "http://example.com/\u2028", "http://\u200b.com/",
    ],
    "control": ["http://example.com/\r\nX: y", "http://example.com/\x7f"],
    "port": [
        "http://example.com:0/", "http://example.com:65536/", "http://example.com:99999999999/",
        "http://example.com:/", "http://example.com:http/", "http://example.com:-1/", "http://example.com:٣/",
        "http://example.com:80:80/",
    ],
    "cannot be read": ["http://[::1/", "http://[::1]x/", "http://[fe80::1%25eth0]/"],
    "not an IPv6 address": ["http://[1.2.3.4]/"],
    "no host name has": [
        "http://127.0.0.%31/", "http://a..b/", "http://.example.com/", "http://exa$mple.com/", "http://*/",
        f"http://{'a' * 64}.com/", f"http://{'a.' * 127}com/", "http://☃\ufe0f\u0301.-/",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("url", "host"),
    [
        (URL, "api.example.com"),
        ("http://example.com", "example.com"),
        ("HTTPS://EXAMPLE.com:8443?q=1#f", "example.com"),
        ("https://API.Example.com.:443/x", "api.example.com"),
        ("https://bücher.example/ü?q=ü", "xn--bcher-kva.example"),
        ("https://8.8.8.8/", "8.8.8.8"),
        ("https://[2606:4700:0::1111]:443/", "2606:4700::1111"),
        ("https://example.com/a@b:c?x=http://other@host", "example.com"),
        ("https://under_score.example.com/%0d%0a", "under_score.example.com"),
    ],
)
def test_a_url_is_http_to_a_public_host(url: str, host: str) -> None:
    checked(http(url=url))
    assert check_url(url, ANYWHERE)[0] == host


@pytest.mark.parametrize("why", WRONG)
def test_a_url_is_refused_with_the_reason(why: str) -> None:
    for url in WRONG[why]:
        assert "hunter2" not in refused(http(url=url), "params.url", why), url
    refused({"method": "get", "params": {}}, "params.url", "is missing")


def test_no_cache_keeps_hosts_that_no_host_name_is_as_long_as() -> None:
    addresses._parsed_authority.cache_clear()
    for number in range(20):
        for char in ("a", "é", "😀"):
            with pytest.raises(InvalidCall, match="lengths"):
                check_url(f"https://{char * 20_000}{number}/", ANYWHERE)
    assert addresses._parsed_authority.cache_info().currsize == 0


@settings(max_examples=examples(100, 300), deadline=None)
@given(samples.urls)
def test_an_accepted_url_means_the_same_host_to_requests(url: str) -> None:
    from requests import Request
    from requests.exceptions import RequestException
    from urllib3.util import parse_url

    try:
        host, _ = check_url(url, Reach(hosts=("*",), networks=("0.0.0.0/0", "::/0")))
    except (InvalidCall, NotAllowed):
        return
    try:
        prepared = Request("GET", url).prepare().url
    except (RequestException, UnicodeError):
        return
    sent_to = (parse_url(str(prepared)).host or "").strip("[]").removesuffix(".")
    if ":" in host:
        from ipaddress import ip_address

        assert ip_address(sent_to) == ip_address(host)
    else:
        assert str(addresses.literal_address(sent_to) or sent_to) == host
