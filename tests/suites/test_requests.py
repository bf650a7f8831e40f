"""What a call sends, byte by byte, against what requests sends for the same arguments."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from callqueue import Rule
from callqueue.exceptions import CallQueueError
from callqueue.execution import wire
from callqueue.models import CallQueue
from callqueue.testing import run_callqueue
from tests.suites.raw_server import RawServer
from tests.suites.shapes import Shape, all_shapes
from tests.support.processes import ROOT

SAME, NEITHER, REFUSED, OTHER, MORE = "same bytes", "both refuse", "refused", "other bytes", "sent"
PAGE = ROOT / "docs" / "reference" / "sending.md"


@dataclass(frozen=True)
class Row:
    """A row of the page's table, by what its first cell begins with: what becomes of these
    shapes.
    """

    begins: str
    verdict: str
    shapes: str


REDIRECTS = [shape.name.replace(" ", "_") for shape in all_shapes() if shape.follows]
ROWS = [
    Row("methods", REFUSED, "method/PURGE method/PROPFIND method/TRACE method/CONNECT"),
    Row("bytes, files", REFUSED, "params/bytes params/bytes_value data/bytes_value data/generator data/file "
        "data/binary data/bytes headers/bytes cookies/jar auth/HTTPDigestAuth auth/HTTPBasicAuth auth/callable "
        "files/bytes files/with_data"),
    Row("names that are no strings", REFUSED, "params/int_name data/int_name json/int_name json/None_as_a_name "
        "params/NUL data/NUL json/NUL json/lone_surrogate json/deeper"),
    Row("nested values", REFUSED, "params/nested_dict data/nested_dict data/zero"),
    Row("`json` beside", REFUSED, "json/beside_data"),
    Row("`Host`", REFUSED, "headers/Host_other.example headers/Content-Length_1 headers/Connection_close "
        "headers/TE_trailers headers/Connection_None"),
    Row("a header in two spellings", REFUSED, "headers/trailing_space headers/space_in_the_name "
        "headers/two_spellings"),
    Row("`;` in a cookie", REFUSED, "cookies/semicolon auth/user_with_a_colon"),
    Row("a cookie whose value", REFUSED, "cookies/None"),
    Row("`user:password@`", REFUSED, "url/backslash url/NUL url/leading_space url/host_with_a_user url/host_percent "
        + " ".join(f"url/{part}_{text}" for part in ("path", "query")
                   for text in ("space", "quotes", "emoji", "zero_width", "line", "tab"))),
    Row("hosts written", OTHER, "url/host_one_number url/host_hexadecimal url/host_octal url/host_short"),
    Row("a form whose values", OTHER, "data/None_alone"),
    Row("redirects", OTHER, " ".join(REDIRECTS)),
]  # fmt: skip
ELSEWHERE = ["the idempotency header"]  # rows that other tests hold: rules may have none, as here

Sent = dict[str, list[bytes] | None]


@pytest.fixture(autouse=True)
def _all_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The testing kit lets requests through to hosts that look like this machine; some of ours do
    not.
    """
    real = wire.request
    monkeypatch.setattr(wire, "request", lambda *args, **kwargs: real(*args, **kwargs))


@pytest.fixture(scope="module")
def shapes() -> list[Shape]:
    return all_shapes()


def url_of(server: RawServer, number: int, shape: Shape) -> str:
    path = shape.path.replace("{}", f"n{number}")
    return (
        f"{path[: len(path) - len(path.lstrip())]}http://{shape.host}:{server.port}{path.lstrip()}"
    )


def by_requests(server: RawServer, shapes: list[Shape]) -> Sent:
    refused = set()
    for number, shape in enumerate(shapes):
        with requests.Session() as session:
            session.trust_env = False
            try:
                session.request(
                    shape.method,
                    url_of(server, number, shape),
                    allow_redirects=shape.follows,
                    timeout=10,
                    **shape.arguments,
                )
            except (requests.RequestException, ValueError, TypeError, UnicodeError, AttributeError):
                refused.add(number)
    return kept(server, shapes, refused)


def by_calls(server: RawServer, shapes: list[Shape]) -> Sent:
    refused = set()
    for number, shape in enumerate(shapes):
        try:
            params = {"url": url_of(server, number, shape), **shape.arguments}
            CallQueue.objects.send({"method": shape.method, "params": params}, rule="plain")
        except (CallQueueError, ValueError, TypeError, UnicodeError):
            refused.add(number)
    run_callqueue()
    return kept(server, shapes, refused)


def kept(server: RawServer, shapes: list[Shape], refused: set[int]) -> Sent:
    taken = server.taken()
    return {
        shape.name: None if number in refused else taken.get(f"n{number}", [])
        for number, shape in enumerate(shapes)
    }


def verdict(ours: list[bytes] | None, theirs: list[bytes] | None) -> str:
    if not ours and not theirs:
        return NEITHER
    if not ours:
        return REFUSED
    if not theirs:
        return MORE
    return SAME if ours == theirs else OTHER


@pytest.mark.django_db(transaction=True)
def test_a_call_sends_the_bytes_that_requests_sends(shapes: list[Shape], settings: Any) -> None:
    settings.CALLQUEUE = {
        "ALLOWED_NETWORKS": ["127.0.0.0/8"],
        "RULES": {
            "plain": Rule(idempotency_header=None),
        },
    }
    with RawServer() as server:
        theirs = by_requests(server, shapes)
        ours = by_calls(server, shapes)
    verdicts = {name: verdict(ours[name], theirs[name]) for name in theirs}
    print(f"{len(shapes)} shapes, {dict(Counter(verdicts.values()))}")
    differing = {name: what for name, what in verdicts.items() if what not in (SAME, NEITHER)}
    told = {name.replace("_", " "): row.verdict for row in ROWS for name in row.shapes.split()}
    for name in sorted(differing.keys() ^ told.keys()):
        print(f"{name}\n    requests {theirs.get(name)}\n    a call   {ours.get(name)}")
    assert differing == told


def test_the_page_lists_these_differences_and_no_others() -> None:
    table = PAGE.read_text().partition("| | `requests` | a call |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    known = [*{row.begins: None for row in ROWS}, *ELSEWHERE]
    assert [cell for cell in cells if not cell.startswith(tuple(known))] == []
    assert [row for row in known if not any(cell.startswith(row) for cell in cells)] == []
