"""What an HTTP call may say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.samples import checked, http, refused


class TestHttpParams:
    @pytest.mark.parametrize(
        ("name", "where"),
        [
            ("timeout", "total_timeout"),
            ("verify", "Rule(verify=...)"),
            ("stream", "MAX_RESPONSE_BYTES"),
            ("proxies", "not offered"),
            ("cert", "not offered"),
            ("allow_redirects", "Location"),
            ("hooks", "classify"),
            ("files", "not offered"),
            ("header", "did you mean 'headers'?"),
        ],
    )
    def test_of_the_rule_are_set_there(self, name: str, where: str) -> None:
        refused(http(**{name: None}), f"params.{name}", where)

    def test_give_one_body(self) -> None:
        refused(http(json={}, data="x"), "params.data", "one body")
        checked(http(json={}, data=""))

    @pytest.mark.parametrize(
        ("headers", "field", "why"),
        [
            ([["a", "b"]], "params.headers", "must be a dict"),
            ({"X-A": 1}, "params.headers.X-A", "must be a string"),
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
