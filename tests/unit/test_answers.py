"""The bytes of an answer come back from the table; what is not whole does not read as if it were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue.answers import BASE64, UTF_8, WITHHELD, Answer, answer_of, pack_body, unpack_body
from callqueue.exceptions import AnswerCut, CallQueueError
from callqueue.fields import UNREADABLE
from callqueue.texts import storable

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\xff\xfe"
CHARSETS = ["utf-8", "ISO-8859-1", "windows-1252", "utf-16", "utf-16-le", "Shift_JIS", "iso2022-jp",
            "gb18030", "hz", "big5", "idna", "no-such", None]  # fmt: skip


def answered(body: bytes, charset: str | None = None, keep: int = 65536, **more: Any) -> Answer:
    text, form = pack_body(body[:keep], charset, is_cut=len(body) > keep)
    row = {"response_status": 200, "response_headers": {"Content-Type": "text/plain"}}
    row |= {"response_body": text, "response_form": form, "response_size": len(body), **more}
    answer = answer_of(SimpleNamespace(**row), UNREADABLE)
    assert answer is not None
    return answer


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode), st.sampled_from(CHARSETS))
def test_the_bytes_that_came_come_back(content: bytes, charset: str | None) -> None:
    text, form = pack_body(content, charset, is_cut=False)
    assert storable(text) == text
    assert unpack_body(text, form) == content


@given(st.text(max_size=100), st.sampled_from(CHARSETS[:10]), st.integers(0, 60))
def test_of_a_body_that_is_cut_the_beginning_comes_back(text: str, charset: Any, keep: int) -> None:
    content = text.encode(charset, "replace")
    kept, form = pack_body(content[:keep], charset, is_cut=len(content) > keep)
    back = unpack_body(kept, form)
    assert content.startswith(back)
    assert min(len(content), keep) - len(back) < 8


@pytest.mark.parametrize(
    ("body", "charset", "column", "form"),
    [
        ("é, 価格".encode(), "utf-8", "é, 価格", UTF_8),
        ("é, 価格".encode(), "ISO-8859-1", "é, 価格", UTF_8),  # claimed by default
        (b"caf\xe9", "iso-8859-1", "café", "latin-1"),
        ("цена".encode("cp1251"), "windows-1251", "цена", "cp1251"),
        (PNG, None, "iVBORw0KGgoAAAANSUhEUv/+", BASE64),
        (b"a\0b", "utf-8", "YQBi", BASE64),
    ],
)
def test_text_stays_readable_in_the_table(
    body: bytes, charset: str | None, column: str, form: str
) -> None:
    assert pack_body(body, charset, is_cut=False) == (column, form)


@pytest.mark.parametrize(
    ("name", "charsets"),
    [
        ("Größe 4 €", "windows-1252 utf-8 utf-16 utf-32"),
        ("Größe", "iso-8859-1"),
        ("中文", "shift_jis iso-2022-jp gb18030 hz"),
    ],
)
def test_json_is_read_in_the_charset_that_the_answer_names(name: str, charsets: str) -> None:
    for charset in charsets.split():
        assert answered(f'{{"name": "{name}"}}'.encode(charset), charset).json() == {"name": name}
    assert answered(f'{{"name": "{name}"}}'.encode()).json() == {"name": name}
    with pytest.raises(ValueError, match="Expecting value"):
        answered(b"<html>").json()
    assert answered(b"", response_status=None).json() is None, "a handler returned nothing"


KEPT = "4 of 10 bytes.*KEEP_RESPONSE_BYTES"
NOT_KEPT = {"response_body": "[not kept: ...]", "response_form": WITHHELD}
SCRUBBED = {"response_body": '{"id": "[secret]"}', "response_form": "scrubbed"}


@pytest.mark.parametrize(
    ("columns", "reads", "body", "why"),
    [
        ({}, {}, b"1234", KEPT),
        ({"response_form": "scrubbed, cut"}, {"scrubbed": True}, b"1234", KEPT),
        (SCRUBBED, {}, b'{"id": "[secret]"}', r"held a secret of the call.*json\(scrubbed=True\)"),
        ({**SCRUBBED, "response_body": "{}"}, {}, b"{}", "held a secret of the call"),
        (NOT_KEPT, {}, b"", "not kept"),
        ({"response_body": UNREADABLE["$unreadable"]}, {}, b"", "not kept"),
        ({"response_headers": UNREADABLE}, {}, b"", "not kept"),
    ],
)
def test_an_answer_that_is_not_whole_does_not_read_as_json(
    columns: Any, reads: Any, body: bytes, why: str
) -> None:
    answer = answered(b"1234567890", keep=4, **columns)
    assert (answer.body, answer.text, answer.size) == (body, body.decode(), 10)
    is_cut = columns.get("response_form") != "scrubbed"
    assert (answer.is_cut, answer.is_scrubbed) == (is_cut, "secret" in why or bool(reads))
    with pytest.raises(AnswerCut, match=why) as refused:
        answer.json(**reads)
    assert refused.value.size == 10 and isinstance(refused.value, CallQueueError)


def test_an_answer_that_is_logged_shows_neither_body_nor_headers() -> None:
    answer = answered(b"private")
    assert answer.headers["content-type"] == "text/plain"
    assert repr(answer) == "Answer(status=200, size=7, is_cut=False, is_scrubbed=False)"
