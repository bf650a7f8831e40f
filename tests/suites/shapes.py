"""Calls of `requests.request` in all the shapes that its documented parameters have.

Out: Shape, whose name says what is special about it; `{}` in its path stands for a place of its
own on the server. Each shape is sent as requests sends it, and as a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import requests
from requests.auth import HTTPBasicAuth, HTTPDigestAuth

METHODS = ("get", "options", "head", "post", "put", "patch", "delete")
TEXTS = {
    "plain": "plain",
    "empty": "",
    "space": "a b",
    "plus": "a+b",
    "percent": "100%",
    "encoded": "a%20b%2Fc",
    "half encoded": "a%2",
    "reserved": "a&b=c;d,e",
    "slashes": "a/b//c/",
    "query": "a?b#c",
    "quotes": "'a' \"b\"",
    "brackets": "[a]{b}<c>|^`",
    "tilde": "~-._!*()",
    "umlauts": "äöüß",
    "decomposed": "a\u0308",
    "cyrillic": "дом",
    "emoji": "😀 ok",
    "right to left": "\u05d0\u05d1",
    "zero width": "a\u200bb",
    "line": "a\nb",
    "tab": "a\tb",
    "long": "x" * 8000,
}
NUMBERS = {
    "zero": 0,
    "one": 1,
    "minus": -7,
    "big": 2**70,
    "float one": 1.0,
    "half": 0.5,
    "third": 1 / 3,
    "small": 1e-7,
    "tiny": 5e-324,
    "1e15": 1e15,
    "1e16": 1e16,
    "1e22": 1e22,
    "3e300": 3e300,
    "minus zero": -0.0,
    "true": True,
    "false": False,
}
ORDERS: dict[str, dict[str, Any]] = {
    "backwards": {"zz": 1, "m": 2, "a": 3},
    "by length": {"long": 1, "b": 2, "aaa": 3},
    "nested": {"z": {"y": 1, "b": [{"q": 1, "c": 2}, {"c": 2, "q": 1}]}, "a": {"b": 2, "a": 1}},
    "cases": {"b": 1, "B": 2, "a": 3, "A": 4},
    "numbers as names": {"10": 1, "9": 2, "1": 3},
    "umlauts": {"ü": 1, "z": 2, "ä": 3},
    "an empty name": {"b": 1, "": 2, "a": 3},
    "forty names": {f"n{40 - number}": number for number in range(40)},
    "$form": {"z": 1, "$form": '{"z":0}', "a": 2},
    "$secret": {"z": 1, "$secret": "NAME", "a": 2},
    "one $secret": {"$secret": "NAME"},
    "__type__": {"__type__": "uuid", "__value__": "00000000-0000-0000-0000-000000000000"},
}


@dataclass(frozen=True)
class Shape:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    method: str = "post"
    path: str = "/{}"
    host: str = "127.0.0.1"
    follows: bool = False


def all_shapes() -> list[Shape]:
    parts = (_methods, _params, _data, _json, _headers, _cookies, _auth, _others, _urls, _redirects)
    found = [shape for part in parts for shape in part()]
    names = [shape.name for shape in found]
    assert len(set(names)) == len(names), "two shapes have one name"
    return found


def _methods() -> Iterator[Shape]:
    bodies: dict[str, dict[str, Any]] = {
        "bare": {},
        "json": {"json": {"b": 1, "a": 2}},
        "form": {"data": {"b": 1, "a": 2}},
        "query": {"params": {"b": 1, "a": 2}},
    }
    for method in METHODS:
        for kind, arguments in bodies.items():
            yield Shape(f"method/{method} {kind}", arguments, method)
    for method in ("PURGE", "PROPFIND", "TRACE", "CONNECT", "PoSt"):
        yield Shape(f"method/{method}", {}, method)


def _named(kind: str, name: str) -> Iterator[Shape]:
    """Texts, numbers and orders in a parameter that is a query or a form."""
    for what, text in TEXTS.items():
        yield Shape(f"{kind}/value {what}", {name: {"q": text}})
        yield Shape(f"{kind}/name {what}", {name: {text: "v"}})
    for what in ("plain", "space", "encoded", "query", "umlauts", "emoji", "long", "empty"):
        yield Shape(f"{kind}/text {what}", {name: TEXTS[what]})
    for what, number in NUMBERS.items():
        yield Shape(f"{kind}/number {what}", {name: {"q": number}})
    for what, mapping in ORDERS.items():
        if what != "nested":
            yield Shape(f"{kind}/order {what}", {name: mapping})
    yield Shape(f"{kind}/lists", {name: {"z": ["b", "a"], "a": [2, 1.0, -0.0]}})
    yield Shape(f"{kind}/pairs", {name: [("z", 1), ("a", 2), ("z", 3)]})
    yield Shape(f"{kind}/tuple of pairs", {name: (("z", "1"), ("a", "2"))})
    yield Shape(f"{kind}/None beside", {name: {"a": None, "b": 1}})
    yield Shape(f"{kind}/None alone", {name: {"a": None}})
    yield Shape(f"{kind}/empty list", {name: []})
    yield Shape(f"{kind}/empty dict", {name: {}})
    yield Shape(f"{kind}/nothing", {name: None})
    yield Shape(f"{kind}/bytes", {name: b"q=1"})
    yield Shape(f"{kind}/bytes value", {name: {"q": b"1"}})
    yield Shape(f"{kind}/int name", {name: {1: "v"}})
    yield Shape(f"{kind}/nested dict", {name: {"q": {"z": 1, "a": 2}}})
    yield Shape(f"{kind}/NUL", {name: {"q": "a\0b"}})


def _params() -> Iterator[Shape]:
    yield from _named("params", "params")
    yield Shape("params/beside a query", {"params": {"b": 1}}, path="/{}?z=0")
    yield Shape("params/beside a fragment", {"params": {"b": 1}}, path="/{}#part")


def _data() -> Iterator[Shape]:
    yield from _named("data", "data")
    yield Shape("data/zero", {"data": 0})
    yield Shape("data/generator", {"data": (part for part in (b"a", b"b"))})
    yield Shape("data/file", {"data": BytesIO(b"content")})
    yield Shape("data/binary", {"data": b"\xff\xfe"})
    typed = {"Content-Type": "text/csv; charset=utf-8"}
    yield Shape("data/text with a type", {"data": "a;b\nü;2\n", "headers": typed})


def _json() -> Iterator[Shape]:
    for what, text in TEXTS.items():
        yield Shape(f"json/text {what}", {"json": text})
        yield Shape(f"json/name {what}", {"json": {text: 1}})
    for what, number in NUMBERS.items():
        yield Shape(f"json/number {what}", {"json": number})
        yield Shape(f"json/numbers {what}", {"json": {"z": [number, [number]], "a": number}})
    for what, mapping in ORDERS.items():
        yield Shape(f"json/order {what}", {"json": mapping})
        yield Shape(f"json/list of {what}", {"json": [mapping, mapping, {"b": 1, "a": 1}]})
    yield Shape("json/null", {"json": None})
    yield Shape("json/empty dict", {"json": {}})
    yield Shape("json/empty list", {"json": []})
    yield Shape("json/list", {"json": [3, 1.0, None, "x", [], {}]})
    yield Shape("json/tuple", {"json": (1, 2)})
    yield Shape("json/nan", {"json": float("nan")})
    yield Shape("json/infinity", {"json": float("inf")})
    yield Shape("json/int name", {"json": {1: 2}})
    yield Shape("json/None as a name", {"json": {None: 2}})
    yield Shape("json/NUL", {"json": "a\0b"})
    yield Shape("json/lone surrogate", {"json": "\ud800"})
    yield Shape("json/bytes", {"json": b"x"})
    yield Shape("json/deep", {"json": _nested(40)})
    yield Shape("json/deeper", {"json": _nested(90)})
    yield Shape("json/beside empty data", {"json": {"a": 1}, "data": {}})
    yield Shape("json/beside data", {"json": {"a": 1}, "data": {"b": 2}})
    yield Shape("json/with a type", {"json": {"a": 1}, "headers": {"Content-Type": "application/vnd.x+json"}})  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"b": value}
    return value


def _headers() -> Iterator[Shape]:
    for name in ("X-One", "x-two", "X_THREE", "Authorization", "Content-Type", "Accept", "accept",
                 "User-Agent", "Accept-Encoding", "Cookie", "Referer", "Range", "If-None-Match"):  # fmt: skip
        yield Shape(f"headers/{name}", {"headers": {name: "value/1"}, "data": "x"})
    for what in ("empty", "reserved", "quotes", "umlauts", "cyrillic", "emoji", "line", "tab"):
        yield Shape(f"headers/value {what}", {"headers": {"X-One": TEXTS[what]}})
    for name in ("Accept", "User-Agent", "Accept-Encoding", "accept", "X-One"):
        yield Shape(f"headers/without {name}", {"headers": {name: None}})
    every = {"Accept": None, "User-Agent": None, "Accept-Encoding": None}
    yield Shape("headers/without any", {"headers": every})
    yield Shape(
        "headers/order", {"headers": {"Z-1": "1", "a-2": "2", "M-3": "3", "User-Agent": "u"}}
    )
    yield Shape("headers/bytes", {"headers": {"X-One": b"v"}})
    yield Shape("headers/number", {"headers": {"X-One": 5}})
    yield Shape("headers/trailing space", {"headers": {"X-One": "v "}})
    yield Shape("headers/leading space", {"headers": {"X-One": " v"}})
    yield Shape("headers/two spellings", {"headers": {"X-One": "1", "x-one": "2"}})
    yield Shape("headers/space in the name", {"headers": {"X One": "1"}})
    for name, value in (("Host", "other.example"), ("Content-Length", "1"), ("Connection", "close"),
                        ("Transfer-Encoding", "chunked"), ("TE", "trailers"), ("Connection", None)):  # fmt: skip
        yield Shape(f"headers/{name} {value}", {"headers": {name: value}, "data": "x"}, "put")


def _cookies() -> Iterator[Shape]:
    for what in ("plain", "empty", "space", "encoded", "quotes", "umlauts"):
        yield Shape(f"cookies/value {what}", {"cookies": {"a": TEXTS[what]}})
    yield Shape("cookies/order", {"cookies": {"zz": "1", "a": "2", "m": "3"}})
    yield Shape("cookies/beside a header", {"cookies": {"a": "1"}, "headers": {"Cookie": "b=2"}})
    yield Shape("cookies/none", {"cookies": {}})
    yield Shape("cookies/semicolon", {"cookies": {"a": "1;b=2"}})
    yield Shape("cookies/None", {"cookies": {"a": None}})
    jar = requests.cookies.cookiejar_from_dict({"z": "1", "a": "2"})  # type: ignore[no-untyped-call]
    yield Shape("cookies/jar", {"cookies": jar})


def _auth() -> Iterator[Shape]:
    for what in ("plain", "space", "umlauts", "empty", "reserved", "percent", "quotes", "cyrillic"):
        yield Shape(f"auth/user {what}", {"auth": (TEXTS[what], "p")})
        yield Shape(f"auth/password {what}", {"auth": ("u", TEXTS[what])})
    yield Shape("auth/password with a colon", {"auth": ("u", "a:b")})
    yield Shape("auth/user with a colon", {"auth": ("u:v", "b")})
    yield Shape(
        "auth/beside a header", {"auth": ("u", "p"), "headers": {"Authorization": "Bearer x"}}
    )
    yield Shape("auth/HTTPBasicAuth", {"auth": HTTPBasicAuth("u", "p")})
    yield Shape("auth/HTTPDigestAuth", {"auth": HTTPDigestAuth("u", "p")})
    yield Shape("auth/callable", {"auth": lambda request: request})


def _others() -> Iterator[Shape]:
    yield Shape("files/bytes", {"files": {"file": b"content"}})
    yield Shape("files/with data", {"files": {"file": b"content"}, "data": {"a": 1}})


def _urls() -> Iterator[Shape]:
    for what, text in TEXTS.items():
        yield Shape(f"url/path {what}", {}, "get", "/{}/" + text)
        yield Shape(f"url/query {what}", {}, "get", "/{}?q=" + text)
    for what, path in {
        "dots": "/{}/a/../b/./c",
        "double slash": "/{}//a",
        "fragment": "/{}#part",
        "empty query": "/{}?",
        "two questions": "/{}?a?b",
        "semicolon": "/{};v=1",
        "colon": "/{}/a:b",
        "at": "/{}/a@b",
        "backslash": "/{}/a\\b",
        "lower hex": "/{}/%c3%bc%2f",
        "NUL": "/{}/a\0b",
        "leading space": " /{}",
        "trailing space": "/{} ",
    }.items():
        yield Shape(f"url/{what}", {}, "get", path)
    for what, host in {"name": "localhost", "capitals": "LOCALHOST", "one number": "2130706433",
                       "hexadecimal": "0x7f.1", "octal": "0177.0.0.1", "short": "127.1",
                       "with a user": "user:password@127.0.0.1", "percent": "local%68ost"}.items():  # fmt: skip
        yield Shape(f"url/host {what}", {}, "get", host=host)


def _redirects() -> Iterator[Shape]:
    """The path tells the server how to redirect: code, then to which place."""
    for code in (301, 302, 303, 307, 308):
        for method in METHODS:
            yield Shape(f"redirect/{code} {method}", {"params": {"b": 1}}, method, f"/{{}}/{code}/here", follows=True)  # fmt: skip
            if method in ("post", "put", "patch", "delete"):
                yield Shape(f"redirect/{code} {method} with a body", {"json": {"b": 1}}, method, f"/{{}}/{code}/here", follows=True)  # fmt: skip
    for code in (301, 302, 307):
        yield Shape(f"redirect/{code} not followed", {}, "get", f"/{{}}/{code}/here")
    for place in ("relative", "fragment", "umlauts", "twice"):
        yield Shape(f"redirect/{place}", {}, "get", f"/{{}}/302/{place}", follows=True)
    others: dict[str, dict[str, Any]] = {
        "auth": {"auth": ("u", "p")},
        "authorization": {"headers": {"Authorization": "Bearer x"}},
        "nothing": {},
        "cookies": {"cookies": {"a": "1"}},
        "api key": {"headers": {"X-Api-Key": "k"}},
    }
    for what, arguments in others.items():
        yield Shape(
            f"redirect/elsewhere with {what}", arguments, "get", "/{}/302/elsewhere", follows=True
        )
        yield Shape(f"redirect/here with {what}", arguments, "get", "/{}/302/here", follows=True)
    yield Shape("redirect/sets a cookie", {}, "get", "/{}/302/cookie", follows=True)
    yield Shape("redirect/to a user", {}, "get", "/{}/302/user", follows=True)
    language = {"Content-Language": "en", "Content-Type": "text/plain"}
    yield Shape(
        "redirect/302 with a language",
        {"data": "x", "headers": language},
        "post",
        "/{}/302/here",
        follows=True,
    )
