"""The bytes of an answer come back from the text that a table keeps, and what is not whole does not
read as if it were.
"""

from __future__ import annotations

import gzip
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callqueue.answers import BASE64, UTF_8, WITHHELD, Answer, answer_of, packed, unpacked
from callqueue.exceptions import AnswerCut, CallQueueError
from callqueue.fields import UNREADABLE
from callqueue.texts import storable

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\xff\xfe"
CHARSETS = ["utf-8", "ISO-8859-1", "windows-1252", "utf-16", "utf-16-le", "Shift_JIS", "iso2022-jp",
            "gb18030", "hz", "big5", "idna", "no-such", None]  # fmt: skip


def answered(body: bytes, charset: str | None = None, keep: int = 65536, **more: Any) -> Answer:
    text, form = packed(body[:keep], charset, is_cut=len(body) > keep)
    row = {"response_status": 200, "response_headers": {"Content-Type": "text/plain"}}
    row |= {"response_body": text, "response_form": form, "response_size": len(body), **more}
    answer = answer_of(SimpleNamespace(**row), UNREADABLE)
    assert answer is not None
    return answer


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode), st.sampled_from(CHARSETS))
def test_the_bytes_that_came_come_back(content: bytes, charset: str | None) -> None:
    text, form = packed(content, charset, is_cut=False)
    assert storable(text) == text
    assert unpacked(text, form) == content


@given(st.text(max_size=100), st.sampled_from(CHARSETS[:10]), st.integers(0, 60))
def test_of_a_body_that_is_cut_the_beginning_comes_back(text: str, charset: Any, keep: int) -> None:
    content = text.encode(charset, "replace")
    kept, form = packed(content[:keep], charset, is_cut=len(content) > keep)
    back = unpacked(kept, form)
    assert content.startswith(back)
    assert min(len(content), keep) - len(back) < 8


@pytest.mark.parametrize(
    ("body", "charset", "column", "form"),
    [
        ("é, 価格".encode(), "utf-8", "é, 価格", UTF_8),
        ("é, 価格".encode(), "ISO-8859-1", "é, 価格", UTF_8),  # claimed by default
        (b"caf\xe9", "iso-8859-1", "café", "latin-1"),
        ("価格".encode("iso2022-jp"), "iso-2022-jp", "価格", "iso2022-jp"),
        ("цена".encode("cp1251"), "windows-1251", "цена", "cp1251"),
        (PNG, None, "iVBORw0KGgoAAAANSUhEUv/+", BASE64),
        (b"a\0b", "utf-8", "YQBi", BASE64),
    ],
)
def test_text_stays_readable_in_the_table(
    body: bytes, charset: str | None, column: str, form: str
) -> None:
    assert packed(body, charset, is_cut=False) == (column, form)


def test_an_answer_reads_as_json_whatever_its_encoding() -> None:
    assert answered('{"price": "4 €"}'.encode()).json() == {"price": "4 €"}
    assert answered('{"price": "4 €"}'.encode("utf-16"), "utf-16").json() == {"price": "4 €"}
    with pytest.raises(ValueError, match="Expecting value"):
        answered(b"<html>").json()
    assert answered(gzip.compress(b"x")).text.startswith("\x1f")


@pytest.mark.parametrize(
    ("name", "charsets"),
    [
        ("Größe", "iso-8859-1 windows-1252 utf-8 utf-16 utf-32"),
        ("中文", "shift_jis iso-2022-jp gb18030 hz"),
    ],
)
def test_json_is_read_in_the_charset_that_the_answer_names(name: str, charsets: str) -> None:
    for charset in charsets.split():
        assert answered(f'{{"name": "{name}"}}'.encode(charset), charset).json() == {"name": name}


def test_headers_know_no_case() -> None:
    assert answered(b"").headers["content-type"] == "text/plain"


def test_a_cut_answer_does_not_read_as_json() -> None:
    answer = answered(b"1234567890", keep=4)
    assert (answer.body, answer.text, answer.size, answer.is_cut) == (b"1234", "1234", 10, True)
    with pytest.raises(AnswerCut, match="4 of 10 bytes.*KEEP_RESPONSE_BYTES") as refused:
        answer.json()
    assert (refused.value.size, refused.value.kept) == (10, 4)
    assert isinstance(refused.value, CallQueueError)


def test_a_scrubbed_answer_reads_as_json_where_that_is_asked_for() -> None:
    scrubbed = {"response_body": '{"id": "[secret]"}', "response_form": "scrubbed"}
    answer = answered(b'{"id": "sk-12345678"}', **scrubbed)
    assert (answer.is_cut, answer.is_scrubbed, answer.body) == (False, True, b'{"id": "[secret]"}')
    with pytest.raises(AnswerCut, match=r"held a secret of the call.*json\(scrubbed=True\)"):
        answer.json()
    assert answer.json(scrubbed=True) == {"id": "[secret]"}
    cut = answered(b"1" * 100, response_body="[secret]1", response_form="scrubbed, cut")
    with pytest.raises(AnswerCut, match="KEEP_RESPONSE_BYTES"):
        cut.json(scrubbed=True)


@pytest.mark.parametrize(
    "column",
    [
        {"response_body": "[not kept: ...]", "response_form": WITHHELD},
        {"response_body": UNREADABLE["$unreadable"]},
        {"response_headers": UNREADABLE},
    ],
)
def test_an_answer_that_is_not_there_is_none_that_is_empty(column: Any) -> None:
    answer = answered(b"{}", **column)
    assert (answer.body, answer.text, answer.is_cut, answer.size) == (b"", "", True, 2)
    with pytest.raises(AnswerCut, match="not kept"):
        answer.json()


def test_an_answer_that_is_logged_shows_neither_body_nor_headers() -> None:
    assert repr(answered(b"private")) == (
        "Answer(status=200, size=7, is_cut=False, is_scrubbed=False)"
    )
