"""What `send` accepts and what it refuses, with the field's name and never with the value."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security.secrets import Secret, marked, unmarked
from callqueue.sending import validation
from callqueue.sending.validation import (
    METHODS,
    CheckedCall,
    check_call,
    check_call_data,
    check_callback,
    check_cost,
    check_key,
    check_params,
    check_priority,
    check_times,
    check_unique_key,
    check_url,
)

URL = "https://api.example.com/v1"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
PARIS = timezone(timedelta(hours=1))


def checked(call_data: Any, **given: Any) -> dict[str, Any]:
    arguments = {
        "methods": METHODS | {"sms", "Fax"},
        "allowed_hosts": ("*",),
        "allowed_networks": (),
        "secret_names": {"STRIPE": "x", "GITHUB": "y"},
        "max_bytes": 262144,
    }
    return check_call_data(call_data, **{**arguments, **given})


def http(**params: Any) -> dict[str, Any]:
    return {"method": "post", "params": {"url": URL, **params}}


def email(**params: Any) -> dict[str, Any]:
    return {
        "method": "send_email",
        "params": {"to": "a@example.com", "subject": "s", "message": "m", **params},
    }


def task(**params: Any) -> dict[str, Any]:
    return {"method": "celery_task", "params": {"name": "shop.tasks.ship", **params}}


def refused(call_data: Any, field: str, why: str = "", **given: Any) -> str:
    with pytest.raises(InvalidCall) as caught:
        checked(call_data, **given)
    assert caught.value.field == field
    assert why in caught.value.why
    return caught.value.why


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels - 1):
        nested = [nested]
    return nested


class TestAGoodCall:
    def test_comes_back_as_a_plain_copy(self) -> None:
        call = http(json={"a": (1, 2.5, None, True)}, headers={"X-Trace": "é"})
        result = checked(call)
        assert result == http(json={"a": [1, 2.5, None, True]}, headers={"X-Trace": "é"})
        assert result is not call
        assert result["params"]["json"] is not call["params"]["json"]

    def test_carries_its_method_beside_it(self) -> None:
        call = check_call({"method": "POST", "params": {"url": URL}}, methods=METHODS, allowed_hosts=["*"],
                          allowed_networks=[], secret_names=(), max_bytes=1000)  # fmt: skip
        assert call == CheckedCall("post", {"method": "post", "params": {"url": URL}})

    @pytest.mark.parametrize(
        "verb", ["get", "options", "head", "post", "put", "patch", "delete", "GET", "Patch"]
    )
    def test_may_use_every_verb_in_any_case(self, verb: str) -> None:
        assert checked({"method": verb, "params": {"url": URL}})["method"] == verb.lower()

    def test_keeps_the_spelling_of_a_handler(self) -> None:
        assert checked({"method": "Fax", "params": {}})["method"] == "Fax"
        assert checked({"method": "SMS", "params": {"anything": [1]}})["method"] == "sms"

    def test_may_use_subclasses_of_the_json_types(self) -> None:
        class Text(str):
            pass

        class Colour(IntEnum):
            RED = 3

        class Point(NamedTuple):
            x: int
            y: int

        result = checked(
            http(json=OrderedDict([(Text("a"), Text("b")), ("c", Colour.RED), ("p", Point(1, 2))]))
        )
        assert result["params"]["json"] == {"a": "b", "c": 3, "p": [1, 2]}
        assert type(result["params"]["json"]["a"]) is str
        assert type(result["params"]["json"]["c"]) is int

    @pytest.mark.parametrize(
        "params",
        [
            {"params": {"q": ["a", "b", Secret("STRIPE")], "n": 1, "skip": None}},
            {"params": "a=b"},
            {"params": [["a", 1], ["a", 2]]},
            {"data": "raw text"},
            {"data": {"a": "b"}},
            {"data": [["a", "b"], ["a", Secret("STRIPE")]]},
            {
                "json": None,
                "data": None,
                "headers": None,
                "cookies": None,
                "auth": None,
                "params": None,
            },
            {"json": "text"},
            {"json": 0, "data": None},
            {"cookies": {"session": "a b,c"}},
            {"auth": ["user", "pass:word"]},
            {"auth": ("user", Secret("STRIPE"))},
            {"headers": {"Authorization": Secret("STRIPE"), "X-Empty": "", "X-Tab": "a\tb"}},
            {"json": {"big": 10**400}},
        ],
    )
    def test_may_say_what_requests_can_carry(self, params: dict[str, Any]) -> None:
        checked(http(**params))


class TestTheShape:
    @pytest.mark.parametrize("call_data", ["{}", None, [], 3, b"{}", MappingProxyType({})])
    def test_must_be_a_dict(self, call_data: Any) -> None:
        refused(call_data, "call_data", "must be a dict")

    def test_has_no_other_keys(self) -> None:
        refused({**http(), "parms": {}}, "call_data.parms", "did you mean 'params'?")
        refused({"method": "get", "url": URL, "params": {}}, "call_data.url", "belongs into params")

    @pytest.mark.parametrize(
        ("call_data", "field", "why"),
        [
            ({"params": {}}, "method", "is missing"),
            ({"method": "", "params": {}}, "method", "is missing"),
            ({"method": 7, "params": {}}, "method", "must be a string"),
            ({"method": ["get"], "params": {}}, "method", "must be a string"),
            ({"method": "pots", "params": {}}, "method", "did you mean 'post'?"),
            ({"method": "send-email", "params": {}}, "method", "did you mean 'send_email'?"),
            ({"method": "get"}, "params", "is missing"),
            ({"method": "get", "params": None}, "params", "must be a dict"),
            ({"method": "get", "params": [1]}, "params", "must be a dict"),
            ({"method": "sms", "params": "text"}, "params", "must be a dict"),
            ({"method": "sms", "params": Secret("STRIPE")}, "params", "inside params"),
            ({1: 2}, "call_data", "key that is not a string"),
        ],
    )
    def test_names_what_is_wrong(self, call_data: Any, field: str, why: str) -> None:
        refused(call_data, field, why)


class TestJson:
    @pytest.mark.parametrize(
        ("value", "why"),
        [
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
        ],
    )
    def test_names_the_path_of_what_it_has_no_word_for(self, value: Any, why: str) -> None:
        refused(
            http(json={"items": [0, 1, 2, {"price": value}]}), "params.json.items[3].price", why
        )

    def test_refuses_numbers_that_python_would_not_read_back(self) -> None:
        checked(http(json=[10**4299]))
        for sign in (1, -1):
            refused(http(json=[sign * 10**4300]), "params.json[0]", "digits")

    @pytest.mark.parametrize("key", [1, None, True, 1.5, (1, 2), b"k"])
    def test_has_only_strings_for_keys(self, key: Any) -> None:
        refused(http(json={"a": [{key: 1}]}), "params.json.a[0]", "key that is not a string")

    @pytest.mark.parametrize(("key", "why"), [("a\0", "NUL"), ("\udfff", "surrogate")])
    def test_has_only_storable_keys(self, key: str, why: str) -> None:
        refused(http(json={"a": {key: 1}}), "params.json.a", why)

    def test_shows_odd_keys_escaped_and_short(self) -> None:
        with pytest.raises(InvalidCall) as caught:
            checked(http(json={"a\r\n" + "b" * 500: math.nan}))
        assert "\n" not in caught.value.field
        assert len(caught.value.field) < 80

    def test_may_nest_64_deep_and_no_deeper(self) -> None:
        checked({"method": "sms", "params": {"a": deep(62)}})
        with pytest.raises(InvalidCall, match=r"^params\.a\[0\].*: is nested deeper than 64"):
            checked({"method": "sms", "params": {"a": deep(63)}})

    def test_refuses_a_hundred_thousand_levels_at_once(self) -> None:
        with pytest.raises(InvalidCall, match="deeper than 64"):
            checked(http(json=deep(100_000)))

    def test_refuses_what_contains_itself(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(InvalidCall, match="deeper than 64"):
            checked(http(json=loop))

    def test_refuses_what_unfolds_to_billions(self) -> None:
        laughs: list[Any] = ["ha"]
        for _ in range(40):
            laughs = [laughs, laughs]
        refused(
            http(json=laughs),
            "call_data",
            "more than 1048576 bytes of JSON; MAX_CALL_BYTES is 262144",
        )

    def test_is_measured_in_bytes_of_utf8(self) -> None:
        call = http(json="é" * 100)
        size = len(json.dumps(call, ensure_ascii=False, separators=(",", ":")).encode())
        assert checked(call, max_bytes=size) == call
        assert str(size) in refused(call, "call_data", max_bytes=size - 1)

    def test_counts_numbers_lists_and_names_exactly(self) -> None:
        call = {
            "method": "sms",
            "params": {"a": [1] * 50, "b": {"": 1, "c": 10**30}, "d": [[], {}, "", 0.5, None]},
        }
        size = len(json.dumps(call, separators=(",", ":")))
        assert checked(call, max_bytes=size) == call
        refused(call, "call_data", max_bytes=size - 1)

    def test_refuses_many_huge_numbers_without_writing_them(self) -> None:
        refused(http(json=[10**4299] * 100_000), "call_data", "more than")


class TestSecrets:
    def test_may_stand_for_the_url(self) -> None:
        checked({"method": "get", "params": {"url": Secret("STRIPE")}}, allowed_hosts=())

    @pytest.mark.parametrize("method", ["send_email", "celery_task"])
    def test_may_stand_for_any_string(self, method: str) -> None:
        secret = Secret("GITHUB")
        params = {"to": [secret], "subject": secret, "message": secret, "reply_to": secret}
        checked(
            {
                "method": method,
                "params": params if method == "send_email" else {"name": secret, "args": [secret]},
            }
        )

    @pytest.mark.parametrize(
        ("reference", "field", "why"),
        [
            (Secret("STRIP"), "params.json.a", "not in SECRETS: 'STRIP'"),
            (Secret("A\nB"), "params.json.a", r"not in SECRETS: 'A\nB'"),
            (Secret("\ud800"), "params.json.a", "half of a surrogate pair"),
        ],
    )
    def test_are_known_by_name_and_no_other_name_is_told(
        self, reference: Any, field: str, why: str
    ) -> None:
        error = refused(http(json={"a": reference}), field, why)
        assert "STRIPE" not in str(error)
        assert "GITHUB" not in str(error)

    @pytest.mark.parametrize(
        "data",
        [
            {"$secret": "STRIPE"}, {"$secret": "NO SUCH"}, {"$secret": 5}, {"$secret": None}, {"$secret": "STRIPE", "x": 1},
            {"$$secret": "STRIPE"}, {"$secret": {"$secret": "STRIPE"}}, [{"$$$secret": ["$secret"]}],
        ],
    )  # fmt: skip
    def test_are_not_named_by_data_that_looks_like_it(self, data: Any) -> None:
        for params in ({"json": data}, {"json": [{"a": data}]}):
            assert checked(http(**params))["params"]["json"] == params["json"]

    def test_are_kept_beside_data_that_looks_like_one(self) -> None:
        both = {"a": Secret("STRIPE"), "b": {"$secret": "STRIPE"}}
        assert checked(http(json=both))["params"]["json"] == both

    @pytest.mark.parametrize(
        "place",
        [{"headers": {"X-A": {"$secret": "STRIPE"}}}, {"auth": ["u", {"$secret": "STRIPE"}]}],
    )
    def test_the_former_way_to_name_one_is_pointed_out(self, place: Any) -> None:
        with pytest.raises(InvalidCall, match=r"callqueue\.Secret\(NAME\)"):
            checked(http(**place))

    @pytest.mark.parametrize("place", ["headers", "cookies"])
    def test_do_not_stand_for_dicts(self, place: str) -> None:
        refused(http(**{place: Secret("STRIPE")}), f"params.{place}", "not a secret")

    def test_are_checked_again_once_they_are_resolved(self) -> None:
        with pytest.raises(InvalidCall, match="line break"):
            check_params("get", {"url": URL, "headers": {"Authorization": "x\n"}}, allowed_hosts=["*"],
                         allowed_networks=[])  # fmt: skip


class TestAUrl:
    @pytest.mark.parametrize(
        "url",
        [
            URL,
            "http://example.com",
            "HTTPS://EXAMPLE.com:8443?q=1#f",
            "https://example.com./",
            "https://bücher.example/ü?q=ü",
            "https://8.8.8.8/",
            "https://[2606:4700::1111]:443/",
            "https://example.com/a@b:c?x=http://other@host",
            "https://under_score.example.com/%0d%0a",
        ],
    )
    def test_is_http_to_a_public_host(self, url: str) -> None:
        checked(http(url=url))

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            (None, "must be an http or https URL"),
            ("", "must be an http or https URL"),
            (5, "must be an http or https URL"),
            ({"a": 1}, "must be an http or https URL"),
            ("ftp://example.com", "http://"),
            ("file:///etc/passwd", "http://"),
            ("javascript:alert(1)", "http://"),
            ("//example.com", "http://"),
            ("example.com", "http://"),
            ("http:/example.com", "http://"),
            ("http:example.com", "http://"),
            ("http://", "no host"),
            ("http:///path", "no host"),
            ("http://?q", "no host"),
            ("http://:80/", "no host"),
            ("http://user:hunter2@example.com/", "auth"),
            ("http://user@example.com/", "auth"),
            ("http://@example.com/", "auth"),
            ("http://example.com\\@evil.com/", "backslash"),
            ("http://example.com/a b", "white space"),
            (" http://example.com/", "white space"),
            ("http://example.com/\r\nX: y", "control"),
            ("http://example.com/\x7f", "control"),
            ("http://example.com/\u2028", "white space"),
            ("http://example.com:0/", "port"),
            ("http://example.com:65536/", "port"),
            ("http://example.com:99999999999/", "port"),
            ("http://example.com:/", "port"),
            ("http://example.com:http/", "port"),
            ("http://example.com:-1/", "port"),
            ("http://example.com:٣/", "port"),
            ("http://example.com:80:80/", "port"),
            ("http://[::1/", "cannot be read"),
            ("http://[::1]x/", "cannot be read"),
            ("http://[fe80::1%25eth0]/", "cannot be read"),
            ("http://[1.2.3.4]/", "not an IPv6 address"),
            ("http://127.0.0.%31/", "no host name has"),
            ("http://a..b/", "no host name has"),
            ("http://.example.com/", "no host name has"),
            ("http://exa$mple.com/", "no host name has"),
            ("http://*/", "no host name has"),
            (f"http://{'a' * 64}.com/", "no host name has"),
            (f"http://{'a.' * 127}com/", "no host name has"),
            ("http://\u200b.com/", "white space"),
            ("http://☃\ufe0f\u0301.-/", "no host name has"),
        ],
    )
    def test_is_refused_with_the_reason(self, url: Any, why: str) -> None:
        text = refused(http(url=url), "params.url", why)
        assert "hunter2" not in text

    def test_is_required(self) -> None:
        refused({"method": "get", "params": {}}, "params.url", "is missing")

    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1", "2130706433", "0x7f.1", "127.1", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "10.0.0.1",
         "169.254.169.254", "192.168.1.1", "[fd00::1]", "0.0.0.0", "127.0.0.1.", "１２７.0.0.1", "127。0。0。1"],
    )  # fmt: skip
    def test_does_not_lead_inside_in_any_spelling(self, host: str) -> None:
        with pytest.raises(NotAllowed, match=r"params\.url"):
            checked(http(url=f"http://{host}/"))

    def test_may_lead_to_networks_that_are_allowed(self) -> None:
        checked(http(url="http://127.0.0.1:8000/"), allowed_networks=["127.0.0.0/8"])

    def test_leads_only_to_allowed_hosts(self) -> None:
        allowed = ("api.example.com", "*.example.org")
        checked(http(url="https://API.example.com./"), allowed_hosts=allowed)
        checked(http(url="https://a.example.org/"), allowed_hosts=allowed)
        for host in ("example.com", "evil.com", "api.example.com.evil.com", "evilexample.org"):
            with pytest.raises(NotAllowed, match=r"params\.url"):
                checked(http(url=f"https://{host}/"), allowed_hosts=allowed)

    def test_gives_its_host(self) -> None:
        assert (
            check_url("https://API.Example.com.:443/x", allowed_hosts=["*"], allowed_networks=[])
            == "api.example.com"
        )
        assert (
            check_url("http://[2606:4700:0::1111]", allowed_hosts=["*"], allowed_networks=[])
            == "2606:4700::1111"
        )


class TestHttpParams:
    @pytest.mark.parametrize(
        ("name", "where"),
        [
            ("timeout", "total_timeout"),
            ("verify", "Rule(verify=...)"),
            ("stream", "MAX_RESPONSE_BYTES"),
            ("proxies", "not offered"),
            ("cert", "not offered"),
            ("allow_redirects", "Rule(follow_redirects=...)"),
            ("hooks", "classify"),
            ("files", "not offered"),
            ("header", "did you mean 'headers'?"),
        ],
    )
    def test_of_the_rule_are_set_there(self, name: str, where: str) -> None:
        refused(http(**{name: None}), f"params.{name}", where)

    def test_give_one_body(self) -> None:
        refused(http(json={}, data=""), "params.data", "one body")

    @pytest.mark.parametrize(
        ("headers", "field", "why"),
        [
            ([["a", "b"]], "params.headers", "must be a dict"),
            ({"X-A": 1}, "params.headers.X-A", "must be a string"),
            ({"X-A": None}, "params.headers.X-A", "must be a string"),
            ({"X-A": "a\r\nB: c"}, "params.headers.X-A", "line break"),
            ({"X-A": "a\n"}, "params.headers.X-A", "line break"),
            ({"X-A": "\x1b"}, "params.headers.X-A", "control"),
            ({"X-A": " a"}, "params.headers.X-A", "white space"),
            ({"X-A": "a "}, "params.headers.X-A", "white space"),
            ({"X-A": "€"}, "params.headers.X-A", "Latin-1"),
            ({"X A": "a"}, "params.headers", "not a header's name"),
            ({"X:": "a"}, "params.headers", "not a header's name"),
            ({"": "a"}, "params.headers", "not a header's name"),
            ({"é": "a"}, "params.headers", "not a header's name"),
            ({"X\r\nY": "a"}, "params.headers", "not a header's name"),
            ({"Host": "evil"}, "params.headers.Host", "leave it out"),
            ({"content-LENGTH": "5"}, "params.headers.content-LENGTH", "leave it out"),
            ({"Transfer-Encoding": "chunked"}, "params.headers.Transfer-Encoding", "leave it out"),
            ({"Connection": "close"}, "params.headers.Connection", "leave it out"),
            ({"X-A": "1", "x-a": "2"}, "params.headers.x-a", "given twice"),
        ],
    )
    def test_have_headers_that_can_be_sent(self, headers: Any, field: str, why: str) -> None:
        refused(http(headers=headers), field, why)

    @pytest.mark.parametrize(
        ("cookies", "field"),
        [
            (["a"], "params.cookies"),
            ({"a": 1}, "params.cookies.a"),
            ({"a": "b; c=d"}, "params.cookies.a"),
            ({"a": "b\r\n"}, "params.cookies.a"),
            ({"a": "€"}, "params.cookies.a"),
            ({"a=": "b"}, "params.cookies"),
        ],
    )
    def test_have_cookies_that_can_be_sent(self, cookies: Any, field: str) -> None:
        refused(http(cookies=cookies), field)

    @pytest.mark.parametrize(
        ("auth", "field"),
        [
            ("user:pass", "params.auth"),
            (["user"], "params.auth"),
            (["a", "b", "c"], "params.auth"),
            ({"user": "a"}, "params.auth"),
            (["user", 1], "params.auth[1]"),
            ([None, "x"], "params.auth[0]"),
            (["us:er", "x"], "params.auth[0]"),
            (["user", "x\r\n"], "params.auth[1]"),
            (["user", "€"], "params.auth[1]"),
        ],
    )
    def test_have_a_user_and_a_password(self, auth: Any, field: str) -> None:
        refused(http(auth=auth), field)

    @pytest.mark.parametrize("place", ["params", "data"])
    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (5, ""),
            (True, ""),
            ({"a": {"b": 1}}, ".a"),
            ({"a": [[1]]}, ".a[0]"),
            ({"a": [1, {"b": 1}]}, ".a[1]"),
            ([["a"]], "[0]"),
            ([["a", 1, 2]], "[0]"),
            ([[1, 2]], "[0]"),
            (["ab"], "[0]"),
            ([["a", {"b": 1}]], "[0][1]"),
        ],
    )
    def test_have_queries_and_forms_that_can_be_written(
        self, place: str, value: Any, path: str
    ) -> None:
        refused(http(**{place: value}), f"params.{place}{path}")


class TestEmail:
    def test_goes_to_one_or_several(self) -> None:
        checked(email(to=["a@example.com", "B <b@example.com>"], cc="c@example.com", bcc=[], reply_to=None,
                      from_email="me@example.com", html_message="<p>\n</p>", message="a\nb"))  # fmt: skip

    @pytest.mark.parametrize(
        ("params", "field", "why"),
        [
            ({"to": None}, "params.to", "is missing"),
            ({"to": ""}, "params.to", "is missing"),
            ({"to": []}, "params.to", "is missing"),
            ({"to": [""]}, "params.to[0]", "must be an address"),
            ({"to": ["a@example.com", 5]}, "params.to[1]", "must be an address"),
            ({"to": {"a": 1}}, "params.to", "must be a list"),
            ({"to": "a@example.com\nBcc: x"}, "params.to", "line break"),
            ({"cc": ["a\r"]}, "params.cc[0]", "line break"),
            ({"reply_to": "a\u2028b"}, "params.reply_to", "line break"),
            ({"subject": "a\nBcc: b"}, "params.subject", "line break"),
            ({"from_email": "a\r\nb"}, "params.from_email", "line break"),
            ({"subject": 5}, "params.subject", "must be a string"),
            ({"message": ["x"]}, "params.message", "must be a string"),
            ({"html": "x"}, "params.html", "html_message"),
        ],
    )
    def test_is_refused_with_the_reason(self, params: dict[str, Any], field: str, why: str) -> None:
        refused(email(**params), field, why)


class TestACeleryTask:
    def test_has_a_name_and_arguments(self) -> None:
        checked(task(args=[1, {"a": 2}], kwargs={"b": 3}))
        checked(task(args=(1,), kwargs=None))

    @pytest.mark.parametrize(
        ("params", "field"),
        [
            ({"name": ""}, "params.name"),
            ({"name": None}, "params.name"),
            ({"name": "a b"}, "params.name"),
            ({"args": {}}, "params.args"),
            ({"args": "ab"}, "params.args"),
            ({"kwargs": [1]}, "params.kwargs"),
            ({"kwargs": Secret("STRIPE")}, "params.kwargs"),
            ({"countdown": 5}, "params.countdown"),
        ],
    )
    def test_is_refused_with_the_field(self, params: dict[str, Any], field: str) -> None:
        refused(task(**params), field)


class TestTheKey:
    @pytest.mark.parametrize(
        ("key", "stored"),
        [
            ("", ""),
            (None, ""),
            ({}, ""),
            ("tenant 7", "tenant 7"),
            ("{not json", "{not json"),
            ("[1]", "[1]"),
            ({"w": "T1", "c": 9}, '{"c":"9","w":"T1"}'),
            ({"é": "ü"}, '{"é":"ü"}'),
            ("x" * 255, "x" * 255),
        ],
    )
    def test_has_one_canonical_text(self, key: Any, stored: str) -> None:
        assert check_key(key) == stored

    @pytest.mark.parametrize(
        "key",
        ["x" * 256, "a\0", "\ud800", '{"a": 1}', " {}", 5, ["a"], b"a", True, {1: "a"}, {"": "a"}, {"a": None},
         {"a": True}, {"a": 1.5}, {"a": "x" * 255}, {"a": 10**5000}, {"a\0": "b"}, {"a": "\0"},
         "a\nb", "\x1b[2J", "a\x7f", "a\x9b", "a\u2028b", "a\tb", {"a": "b\n"}, {"a\r": "b"}],
    )  # fmt: skip
    def test_is_refused(self, key: Any) -> None:
        with pytest.raises(InvalidCall, match="^key"):
            check_key(key)


class TestTheOtherArguments:
    @pytest.mark.parametrize(
        ("cost", "stored"),
        [
            (None, 1),
            (1, 1),
            (0, 0),
            (500, 500),
            ({}, 1),
            ({"tokens": 1500}, {"tokens": 1500}),
            ({"a": 0}, {"a": 0}),
        ],
    )
    def test_a_cost_is_units(self, cost: Any, stored: Any) -> None:
        assert check_cost(cost) == stored

    @pytest.mark.parametrize(
        "cost",
        [-1, True, 1.5, "1", [1], 2**31, {"a": -1}, {"a": True}, {"a": 1.0}, {"": 1}, {1: 1}, {"a": None},
         {"a" * 300: 1}, {"a\0": 1}, {"a\n": 1}],
    )  # fmt: skip
    def test_a_cost_that_is_none_is_refused(self, cost: Any) -> None:
        with pytest.raises(InvalidCall, match="^cost"):
            check_cost(cost)

    def test_a_priority_fits_its_column(self) -> None:
        assert [check_priority(p) for p in (-32768, 0, 32767)] == [-32768, 0, 32767]
        for wrong in (-32769, 32768, True, 1.0, "1", None):
            with pytest.raises(InvalidCall, match="^priority"):
                check_priority(wrong)

    def test_times_are_aware_and_in_order(self) -> None:
        later = NOW + timedelta(hours=1)
        check_times(NOW, None, None)
        check_times(NOW, NOW - timedelta(days=9), None)
        check_times(NOW, NOW, later)
        check_times(NOW, later, later.astimezone(PARIS))

    @pytest.mark.parametrize(
        ("not_before", "expires_at", "field", "why"),
        [
            (datetime(2031, 1, 1), None, "not_before", "naive"),
            (None, datetime(2031, 1, 1), "expires_at", "naive"),
            (None, NOW, "expires_at", "past"),
            (None, NOW - timedelta(seconds=1), "expires_at", "past"),
            (NOW + timedelta(2), NOW + timedelta(1), "expires_at", "before not_before"),
            (timedelta(1), None, "not_before", "must be a datetime"),
            ("2031-01-01", None, "not_before", "must be a datetime"),
            (date(2031, 1, 1), None, "not_before", "must be a datetime"),
            (None, 5, "expires_at", "must be a datetime"),
            (
                datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
                None,
                "not_before",
                "out of the range",
            ),
        ],
    )
    def test_times_that_cannot_be_kept_are_refused(
        self, not_before: Any, expires_at: Any, field: str, why: str
    ) -> None:
        with pytest.raises(InvalidCall, match=why) as caught:
            check_times(NOW, not_before, expires_at)
        assert caught.value.field == field

    def test_a_unique_key_is_a_text_or_none(self) -> None:
        assert check_unique_key(None) is None
        assert check_unique_key("order-5") == "order-5"
        for wrong in ("", "a\0", "x" * 256, 5, b"x", "\ud800", "a\nb", "\x1b[2J"):
            with pytest.raises(InvalidCall, match="^unique_key"):
                check_unique_key(wrong)

    def test_a_callback_is_the_name_of_a_task(self) -> None:
        assert check_callback(None) is None
        assert check_callback("shop.tasks.paid") == "shop.tasks.paid"
        for wrong in ("", "a b", "a\0", "x" * 256, len, 5, "\ud800", "a\x1b[2J", "a\n", "a\x9b"):
            with pytest.raises(InvalidCall, match="^callback"):
                check_callback(wrong)


# --- properties

texts = st.text(st.characters(exclude_categories=()), max_size=12)
json_leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
other_leaves = (
    st.binary(max_size=4)
    | st.datetimes()
    | st.sets(st.integers(), max_size=2)
    | st.decimals()
    | st.uuids()
)
names = texts | st.sampled_from(
    ["$secret", "url", "headers", "auth", "method", "params", "json", "data", "cookies"]
)
known = st.sampled_from(["STRIPE", "GITHUB", "NO"])
secret = st.fixed_dictionaries({"$secret": known}) | st.builds(Secret, known)
values = st.recursive(
    json_leaves | other_leaves | secret,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(names, inner, max_size=4)
        | st.dictionaries(names | st.integers() | st.none(), inner, max_size=2)
    ),
    max_leaves=6,
)
urls = (
    texts
    | st.builds("http://{}".format, texts)
    | st.builds(
        "{}://{}:{}/{}".format,
        st.sampled_from(["http", "https", "HTTP"]),
        texts,
        st.integers(-1, 70000),
        texts,
    )
    | st.ip_addresses().map(lambda a: f"http://[{a}]/" if a.version == 6 else f"http://{a}/")
    | st.just(URL)
)
argument_names = names | st.sampled_from(["to", "subject", "name", "args", "kwargs", "timeout"])
params = st.dictionaries(argument_names, values, max_size=4) | (
    st.fixed_dictionaries(
        {"url": urls | values},
        optional={
            "headers": st.dictionaries(texts, texts | values, max_size=3) | values,
            "cookies": st.dictionaries(texts, texts | values, max_size=3) | values,
            "auth": st.lists(texts | values, max_size=3) | values,
            "params": values,
            "data": values,
            "json": values,
        },
    )
)
call_datas = values | st.fixed_dictionaries(
    {
        "method": st.sampled_from([*sorted(METHODS), "sms", "POST"]) | values,
        "params": params | values,
    }
)


def test_no_cache_keeps_hosts_that_no_host_name_is_as_long_as() -> None:
    validation._read_authority.cache_clear()
    for number in range(20):
        for char in ("a", "é", "😀"):
            with pytest.raises(InvalidCall, match="lengths"):
                check_url(
                    f"https://{char * 20_000}{number}/", allowed_hosts=["*"], allowed_networks=[]
                )
    assert validation._read_authority.cache_info().currsize == 0


@settings(max_examples=400, deadline=None)
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
    text = json.dumps(marked(result), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assert unmarked(json.loads(text)) == result
    assert len(text.encode()) <= max_bytes
    assert "\\u0000" not in json.dumps(marked(result)).replace("\\\\", "")
    assert checked(result, max_bytes=max_bytes) == result


@settings(max_examples=300, deadline=None)
@given(urls)
def test_an_accepted_url_means_the_same_host_to_requests(url: str) -> None:
    from requests import Request
    from requests.exceptions import RequestException
    from urllib3.util import parse_url

    try:
        host = check_url(url, allowed_hosts=["*"], allowed_networks=["0.0.0.0/0", "::/0"])
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
        assert sent_to == host


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(values, st.datetimes(timezones=st.none() | st.timezones()) | values)
def test_the_other_arguments_are_kept_or_refused(value: Any, moment: Any) -> None:
    checks = (check_cost, check_priority, check_unique_key, check_callback)
    for check in checks:
        try:
            check(value)
        except InvalidCall as error:
            str(error).encode()
    try:
        check_times(NOW, moment, value)
    except InvalidCall as error:
        assert error.field in ("not_before", "expires_at")
