"""Whatever spelling a secret comes back in, none of it is left; and nothing else is taken."""

from __future__ import annotations

import base64
import html
import json
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.security.needles import PART
from callqueue.security.scrubbing import clean, payload_of, scrub, scrub_json

KEY = "sk_live/4eC3+9Hq=&é\"x'"


ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "quoted": quote,
    "quoted fully": lambda v: quote(v, safe=""),
    "quoted for a form": quote_plus,
    "quoted in lower case": lambda v: "".join(
        c if c.isalnum() else quote(c, safe="").lower() for c in v
    ),
    "quoted twice": lambda v: quote(quote(v, safe=""), safe=""),
    "json": lambda v: json.dumps(v)[1:-1],
    "json, not ascii": lambda v: json.dumps(v, ensure_ascii=False)[1:-1],
    "json with escaped slashes": lambda v: json.dumps(v)[1:-1].replace("/", "\\/"),
    "json in json": lambda v: json.dumps(json.dumps(v)[1:-1])[1:-1],
    "repr": lambda v: repr(v)[1:-1],
    "repr of bytes": lambda v: repr(v.encode())[2:-1],
    "html": html.escape,
    "html, decimal": lambda v: "".join(
        c if c.isalnum() and c.isascii() else f"&#{ord(c)};" for c in v
    ),
    "html, hexadecimal": lambda v: "".join(
        c if c.isalnum() and c.isascii() else f"&#x{ord(c):X};" for c in v
    ),
    "utf-8 read as latin-1": lambda v: v.encode().decode("latin-1"),
    "every letter percent-encoded": lambda v: "".join(f"%{byte:02X}" for byte in v.encode()),
    "every letter percent-encoded twice": lambda v: "".join(
        f"%25{byte:02x}" for byte in v.encode()
    ),
    "every letter a JSON escape": lambda v: "".join(f"\\u{unit:04x}" for unit in units(v)),
    "every letter an entity": lambda v: "".join(f"&#{ord(char)};" for char in v),
    "every letter a hexadecimal entity": lambda v: "".join(f"&#x{ord(char):x};" for char in v),
    "html in json in a query": lambda v: quote(json.dumps(html.escape(v))[1:-1], safe=""),
    "hex": lambda v: v.encode().hex(),
    "HEX": lambda v: v.encode().hex().upper(),
    "base64": lambda v: b64encode(v.encode()).decode(),
    "base64 for urls": lambda v: urlsafe_b64encode(v.encode()).decode(),
    "base64 in a url": lambda v: quote(b64encode(v.encode()).decode(), safe=""),
    "base64 in lines": lambda v: "\r\n".join(lines(b64encode(v.encode()).decode(), 6)),
    "base64 in lines, in json": lambda v: json.dumps(
        "\n".join(lines(b64encode(v.encode()).decode(), 6))
    )[1:-1],
    "base64 as MIME has it": lambda v: base64.encodebytes(v.encode()).decode().rstrip("\n"),
}


def units(text: str) -> list[int]:
    raw = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2]) for at in range(0, len(raw), 2)]


def lines(text: str, width: int) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


def longest_part(text: str, value: str) -> str:
    """The longest part of the value that is in the text."""
    parts = {value[at:to] for at in range(len(value)) for to in range(at + 1, len(value) + 1)}
    return max((part for part in parts if part in text), key=len, default="")


class TestScrub:
    @pytest.mark.parametrize("encoding", ENCODINGS)
    @pytest.mark.parametrize(
        "value",
        [KEY, "plainAlnum123", "a b/c?d", "<&>\"'\\", "-----BEGIN\nKEY\n-----", "pä§😀wörd"],
    )
    def test_finds_a_value_in_every_usual_encoding(self, encoding: str, value: str) -> None:
        seen = ENCODINGS[encoding](value)
        assert scrub(f'{{"echo": "{seen}", "n": 1}}', (value,)) == '{"echo": "[secret]", "n": 1}'

    @pytest.mark.parametrize("user", ["", "u", "us", "use", "user"])
    def test_finds_the_password_of_basic_authentication_whatever_the_user(self, user: str) -> None:
        encoded = b64encode(f"{user}:correct-horse-battery".encode()).decode()
        left = scrub(encoded, ("correct-horse-battery",))
        assert "[secret]" in left
        assert len(left.replace("[secret]", "")) <= len(user) + 8

    def test_takes_the_longer_value_first(self) -> None:
        assert scrub("abcdefgh abcd", ("abcd", "abcdefgh")) == "[secret] [secret]"

    def test_takes_a_short_value_only_where_it_stands_alone(self) -> None:
        assert (
            scrub("id=42&n=1429 (42) x42 42_a", ("42",))
            == "id=[secret]&n=1429 ([secret]) x42 [secret]_a"
        )
        assert scrub("a 12345 b", ("1234",)) == "a [secret]5 b"

    def test_leaves_everything_else(self) -> None:
        assert scrub("nothing here", ("secret-value",)) == "nothing here"
        assert scrub("nothing here", ()) == "nothing here"
        assert scrub("nothing here", ("",)) == "nothing here"
        assert scrub("", ("abcd",)) == ""

    def test_takes_characters_literally(self) -> None:
        assert scrub("aXbc a.b*c", ("a.b*c",)) == "aXbc [secret]"

    def test_reaches_into_json(self) -> None:
        body = {"echo": ["my-secret-1", {"my-secret-1": 5}], "n": None}
        assert scrub_json(body, ("my-secret-1",)) == {
            "echo": ["[secret]", {"[secret]": 5}],
            "n": None,
        }
        assert scrub_json(body, ()) == body

    @pytest.mark.parametrize("flood", ["\\", "%25", "&#0", "%2", "/", "\\\\u00"])
    def test_takes_linear_time_on_hostile_answers(self, flood: str) -> None:
        began = time.perf_counter()
        scrub(flood * 200_000, ("/\\/ secret%&", "\\" * 30 + "x\\\\y"))
        assert time.perf_counter() - began < 5

    def test_is_quick_on_a_long_key(self) -> None:
        key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC+/\n" * 50
        assert scrub(json.dumps({"k": key}), (key,)) == '{"k": "[secret]"}'

    @settings(max_examples=150, deadline=None)
    @given(
        st.text(min_size=4, max_size=20).filter(str.strip),
        st.sampled_from(sorted(ENCODINGS)),
        st.text(max_size=5),
    )
    def test_leaves_no_value_in_any_encoding(self, value: str, encoding: str, around: str) -> None:
        try:
            seen = ENCODINGS[encoding](value)
        except UnicodeEncodeError:
            return
        scrubbed = scrub(f"{around} {seen} {around}", (value,))
        assert "[secret]" in scrubbed
        assert seen not in scrubbed.replace("[secret]", "\U0010ffff")


class TestParts:
    VALUE = "sk_live_4eC39HqLyjWDarjtT1zdp7dc"

    @pytest.mark.parametrize("encoding", ENCODINGS)
    @given(begin=st.integers(0, 24), length=st.integers(PART, 32))
    def test_any_part_of_eight_characters_is_found(
        self, encoding: str, begin: int, length: int
    ) -> None:
        part = self.VALUE[begin : begin + length]
        if len(part) < PART:
            return
        left = scrub(f"<{ENCODINGS[encoding](part)}>", (self.VALUE,)).replace("[secret]", "")
        assert longest_part(left, part) in ("", *part), left

    @given(st.text("abAB01-_=+/%\\ ", min_size=PART, max_size=40), st.data())
    def test_of_any_value(self, value: str, data: st.DataObject) -> None:
        begin = data.draw(st.integers(0, len(value) - PART))
        end = data.draw(st.integers(begin + PART, len(value)))
        left = scrub(f"x: {value[begin:end]}\n", (value,)).replace("[secret]", "\n")
        assert len(longest_part(left, value)) < PART

    @pytest.mark.parametrize("cut", range(1, 40))
    def test_where_a_text_was_cut_no_more_than_seven_are_left(self, cut: int) -> None:
        text = f"you sent {self.VALUE} and"[:-cut]
        assert len(longest_part(scrub(text, (self.VALUE,)), self.VALUE)) < PART

    def test_what_surrounds_a_value_tells_nothing(self) -> None:
        values = (
            "Bearer abcdefgh12345678",
            "https://hooks.example.com/services/T0/B0/xyzxyz",
            "-----BEGIN PRIVATE KEY-----\nMIIE12345678\n-----END PRIVATE KEY-----",
        )
        text = "Bearer tokens, https://other.example.org/, -----BEGIN CERTIFICATE-----"
        assert scrub(text, values) == text

    @pytest.mark.parametrize(
        ("value", "piece"),
        [
            ("Bearer abcdef123", "abcdef123"),
            ("https://hooks.example.com/services/T0/B0/xyz", "/services/T0/B0/xyz"),
            ("https://hooks.example.com/services/T0/B0/xyz", "hooks.example.com"),
            ("https://hooks.example.com:8443/services/T0/B0/xyz", "hooks.example.com"),
            ("https://hooks.example.com:8443/services/T0/B0/xyz", "hooks.example.com:8443"),
            ("https://api.example.com/v1?key=abcdef123", "abcdef123"),
            ("https://api.example.com/v1?key=abcdef123", "/v1?key=abcdef123"),
            ("abcdef123\n", "abcdef123"),
            ("-----BEGIN KEY-----\nMIIE12345678\n-----END KEY-----", "MIIE12345678"),
        ],
    )
    def test_the_parts_that_are_told_on_their_own_are_as_secret(
        self, value: str, piece: str
    ) -> None:
        assert scrub(f"<{piece}>", (value,)) == "<[secret]>"


@pytest.mark.parametrize(
    "flood",
    ["&amp;", "&amp", "amp;", "\\\\n", "%25%", "a", "sk_l", "%73", "&#115;", "c2tf", "\r\n", "="],
)
def test_no_answer_takes_long(flood: str) -> None:
    began = time.perf_counter()
    scrub((flood * 262_144)[:262_144], ("sk_live_4eC39HqLyjWDarjtT1zdp7dc", "/\\/ secret%&"))
    assert time.perf_counter() - began < 5


class TestClean:
    def test_scrubs_before_anybody_cuts(self) -> None:
        value = "sk_live_0123456789abcdef"
        for before in range(480, 500):
            said = clean(f"ConnectionError: {'x' * before} {value}", (value,))[:500]
            assert len(longest_part(said, value)) < PART

    def test_takes_a_payload_out_in_whatever_form_an_error_repeats_it(self) -> None:
        payload = payload_of(
            "sms", {"name": "patient\nzero 'A'", "long": "lorem ipsum " * 100, "few": "abc"}
        )
        name = "patient\nzero 'A'"
        for text in (
            name,
            repr(name),
            str(KeyError(name)),
            json.dumps(name),
            ascii(name),
            html.escape(name),
        ):
            assert "zero" not in clean(f"no such {text}", (), payload)
        assert "lorem" not in clean(f"ValueError: {('lorem ipsum ' * 100)[7:500]}", (), payload)
        assert (
            clean("abc is no payload that tells something", (), payload)
            == "abc is no payload that tells something"
        )

    def test_looks_at_both_ends_of_a_text_without_end(self) -> None:
        value = "sk_live_0123456789abcdef"
        text = clean(f"{value} {'x' * 10_000_000} {value}", (value,))
        assert len(text) < 200_000
        assert "sk_live" not in text
