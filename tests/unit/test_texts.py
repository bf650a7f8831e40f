"""Text as databases keep it: whatever is said, in whatever charset it claims to be said."""

from __future__ import annotations

import codecs
import encodings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from callqueue.texts import (
    LONGEST_LABEL,
    codec_of,
    decoded,
    in_one_line,
    storable,
    storable_json,
    suggest,
    worded,
    worded_reason,
)

anything = st.text(st.characters() | st.characters(categories=["Cs"]) | st.just("\0"))
HOSTILE = ["undefined", "idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7", "hex", "zlib", "bz2",
           "rot13", "mbcs"]  # fmt: skip


@given(anything)
@example("\ud83d\ude00 \ud83d \ude00\ud83d")
def test_what_is_stored_is_text_without_nul_and_as_near_as_can_be(text: str) -> None:
    stored = storable(text)
    assert "\0" not in stored
    joined = stored.encode().decode()
    assert joined == stored == storable(stored)
    if "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text):
        assert stored == text
    assert storable("a\ud83d\ude00b") == "a😀b"
    assert storable_json({"\ud83d": ["\0a", {"b": "\ude00\ud83db"}, 5, None]}) == {
        "\ufffd": ["a", {"b": "\ufffd\ufffdb"}, 5, None]
    }


@given(
    st.text() | st.sampled_from(sorted(set(encodings.aliases.aliases) | set(HOSTILE))),
    st.binary(max_size=200),
)
def test_a_body_has_a_text_whatever_charset_it_claims(label: str, raw: bytes) -> None:
    text = decoded(raw, label)
    assert text == storable(text)
    assert codecs.lookup(codec_of(label)).decode(raw, "replace")


@pytest.mark.parametrize(
    ("label", "raw", "text"),
    [
        ("UTF8", "é".encode(), "é"),
        ("iso-8859-1", "é".encode(), "é"),  # what is claimed where nothing is
        ("ISO-8859-15", b"\xa4", "€"),
        ("ISO-8859-15" + " " * LONGEST_LABEL, b"\xa4", "\ufffd"),
        ("windows-1252", b"\x80", "€"),
        ("Shift_JIS", "日本".encode("shift-jis"), "日本"),
        ("GB18030", "中".encode("gb18030"), "中"),
        ("utf-16", "é".encode("utf-16"), "é"),
        ("utf-16", b"\xff\xfe\x3d\xd8", "\ufffd"),
        (None, b"\xff\0", "\ufffd"),
        *[(label, "+2AA- \\ud800 é".encode(), "+2AA- \\ud800 é") for label in HOSTILE],
    ],
)
def test_charsets_that_are_in_use_are_read_and_codecs_that_are_none_never_used(
    label: str | None, raw: bytes, text: str
) -> None:
    assert decoded(raw, label) == text


def test_no_cache_keeps_the_charsets_that_strangers_claim() -> None:
    decoded(b"", "no-such-charset")
    before = set(encodings._cache)  # type: ignore[attr-defined]
    for number in range(1000):
        decoded(b"x", f"x-{number}-{'y' * (number % (2 * LONGEST_LABEL))}")
        decoded(b"x", f"utf{'-' * (number % 50)}8{' ' * (number % 7)}")
    assert set(encodings._cache) - before <= {"utf_8"}  # type: ignore[attr-defined]


class Wordless(Exception):
    def __str__(self) -> str:
        raise SystemExit


def test_anything_that_is_raised_has_words() -> None:
    assert worded(ValueError("half a \ud83d")) == "ValueError: half a \ufffd"
    assert worded(SystemExit(3)) == "SystemExit: 3"
    assert worded(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert (
        worded(Wordless())
        == in_one_line(ValueError("Wordless"))
        == worded_reason(Wordless())
        == "Wordless"
    )
    assert in_one_line(ValueError(" a\n\tb ")) == "a b"
    assert in_one_line(ValueError("half a \ud83d")) == "half a \ufffd"
    assert in_one_line(Wordless()) == "Wordless"
    assert (in_one_line(ValueError()), len(in_one_line(ValueError("x" * 999)))) == (
        "ValueError",
        300,
    )
    said = [worded_reason(why) for why in ("no", None, 402, KeyError("x"))]
    assert said == ["no", "", "402", "KeyError: 'x'"]


def test_a_name_is_suggested_whatever_its_case_and_left_out_ones_are_counted() -> None:
    assert suggest("Default", ["default", "pay"]) == "; did you mean 'default'?"
    assert suggest("zzz", [f"r{n:02}" for n in range(14)]).endswith("'r10', 'r11', and 2 more")
    assert suggest("zzz", ["a", "b"]) == "; there are 'a', 'b'"
