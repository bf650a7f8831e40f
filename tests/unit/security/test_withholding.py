"""Whatever spelling a secret comes back in, it is not kept; and nothing else is withheld.

The judge here knows nothing of how the module reads: it decodes a text in every way it can, in
every order, and looks for letters and digits.
"""

from __future__ import annotations

import base64
import html
import json
import logging
import random
import re
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from itertools import cycle
from urllib.parse import quote, quote_plus, unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.security.withholding import (
    PART,
    WITHHELD,
    clean_of_secrets,
    payload_strings,
    tells,
    withhold,
    withholding,
)
from tests.support.length import examples

Encoding = Callable[[str], str]
KEY = "sk_live/4eC3+9Hq=&é\"x'"
TOKEN = "sk_live_4eC39HqLyjWDarjtT1zdp7dc"
VALUES = [KEY, "plainAlnum123", "a b/c?d", "<&>\"'\\", "-----BEGIN\nKEY\n-----", "pä§😀wörd"]


def units(text: str) -> list[int]:
    raw = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2]) for at in range(0, len(raw), 2)]


def lines(text: str, width: int = 6) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


def each(
    form: Callable[[str], str], *, but: Callable[[str], bool] = lambda char: False
) -> Encoding:
    """Each letter in a form of its own, but for some."""
    return lambda value: "".join(char if but(char) else form(char) for char in value)


def is_plain(char: str) -> bool:
    return char.isalnum() and char.isascii()


def folded(text: str) -> str:
    return b64encode(text.encode()).decode()


def fully(text: str) -> str:
    return quote(text, safe="")


def in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


ENCODINGS: dict[str, Encoding] = {
    "plain": str,
    "quoted": quote,
    "quoted fully": fully,
    "quoted for a form": quote_plus,
    "quoted in lower case": each(lambda c: fully(c).lower(), but=str.isalnum),
    "quoted twice": lambda v: fully(fully(v)),
    "json": in_json,
    "json, not ascii": lambda v: json.dumps(v, ensure_ascii=False)[1:-1],
    "json with escaped slashes": lambda v: in_json(v).replace("/", "\\/"),
    "json in json": lambda v: in_json(in_json(v)),
    "repr": lambda v: repr(v)[1:-1],
    "repr of bytes": lambda v: repr(v.encode())[2:-1],
    "html": html.escape,
    "html, decimal": each(lambda c: f"&#{ord(c)};", but=is_plain),
    "html, hexadecimal": each(lambda c: f"&#x{ord(c):X};", but=is_plain),
    "utf-8 read as latin-1": lambda v: v.encode().decode("latin-1"),
    "every letter percent-encoded": lambda v: "".join(f"%{byte:02X}" for byte in v.encode()),
    "every letter percent-encoded twice": lambda v: "".join(f"%25{b:02x}" for b in v.encode()),
    "every letter a JSON escape": lambda v: "".join(f"\\u{unit:04x}" for unit in units(v)),
    "every letter an entity": each(lambda c: f"&#{ord(c)};"),
    "every letter a hexadecimal entity": each(lambda c: f"&#x{ord(c):x};"),
    "html in json in a query": lambda v: fully(in_json(html.escape(v))),
    "hex": lambda v: v.encode().hex(),
    "HEX": lambda v: v.encode().hex().upper(),
    "hex with colons": lambda v: v.encode().hex(":"),
    "base64": folded,
    "base64, second offset": lambda v: folded(f"x{v}!"),
    "base64, third offset": lambda v: folded(f"me{v}!?"),
    "base64 for urls": lambda v: urlsafe_b64encode(v.encode()).decode(),
    "base64 in a url": lambda v: fully(folded(v)),
    "base64 in lines": lambda v: "\r\n".join(lines(folded(v))),
    "base64 in lines, in json": lambda v: in_json("\n".join(lines(folded(v)))),
    "base64 as MIME has it": lambda v: base64.encodebytes(v.encode()).decode().rstrip("\n"),
}


# --- The judge


def unescaped(text: str) -> str:
    code = r"\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))"
    text = re.sub(code, lambda found: chr(int(found[1] or found[2], 16)), text)
    return re.sub(r"\\+([nrt])?", "", text)


def from_base64(text: str) -> str:
    """Every run of its letters, from each of the four at which it may begin."""
    text = re.sub(r"\s|\\+[nrt]|%0[AD]", "", text).replace("-", "+").replace("_", "/")
    found = []
    for run in re.findall("[A-Za-z0-9+/]{8,}", unquote(text)):
        for at in range(4):
            whole = run[at : at + (len(run) - at) // 4 * 4]
            found.append(base64.b64decode(whole).decode("latin-1"))
    return "\n|\n".join(found)


def from_hex(text: str) -> str:
    runs = re.findall("[0-9a-fA-F]{8,}", text.replace(":", ""))
    pieces = (run[at : at + (len(run) - at) // 2 * 2] for run in runs for at in (0, 1))
    return "\n|\n".join(bytes.fromhex(piece).decode("latin-1") for piece in pieces)


DECODERS = (unquote, html.unescape, unescaped, from_base64, from_hex)


def decoded(text: str, depth: int = 3) -> Iterator[str]:
    yield text
    for decode in DECODERS if depth else ():
        if (other := decode(text)) not in ("", text):
            yield from decoded(other, depth - 1)


def letters(text: str) -> str:
    return re.sub("[^0-9A-Za-z]", "", text)


def is_told(text: str, value: str) -> bool:
    """Whether 8 letters and digits of the value in a row, or all of fewer, are in the text."""
    flat = letters(value)
    parts = [flat[at : at + PART] for at in range(len(flat) - PART + 1)]
    for reading in decoded(text):
        if any(part in letters(reading) for part in parts) or (not parts and value in reading):
            return True
    return False


# --- What is found


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_value_is_found_in_every_usual_encoding(encoding: str) -> None:
    places = cycle(('{{"echo": "{}", "n": 1}}', "it was {}, no?", "a\n{}\nb"))
    for value, around in zip([*VALUES, KEY], places, strict=False):
        text = around.format(ENCODINGS[encoding](value))
        kept = withhold(text, (value,))
        assert tells(text, (value,))
        assert WITHHELD in kept
        assert not is_told(kept, value)


@settings(max_examples=examples(60, 150), deadline=None)
@given(
    st.text(min_size=4, max_size=20).filter(lambda value: value.strip(" \r\n\t\\+\0")),
    st.sampled_from(sorted(ENCODINGS)),
    st.text(max_size=5),
)
def test_of_any_value(value: str, encoding: str, around: str) -> None:
    try:
        seen = ENCODINGS[encoding](value)
    except UnicodeEncodeError:
        return
    if "offset" in encoding and len(value.encode()) < 5:
        return  # inside other base64, too few of its letters are decided
    kept = withhold(f"{around} {seen} {around}", (value,))
    assert WITHHELD in kept
    assert not is_told(kept.replace(WITHHELD, "\n"), value)


def test_encodings_inside_each_other_up_to_three() -> None:
    dice = random.Random(0)
    names = [name for name in ENCODINGS if "base64" not in name and not name.startswith(("h", "H"))]
    for _ in range(examples(200, 1200)):
        first = dice.choice([*ENCODINGS])
        seen = ENCODINGS[first](TOKEN)
        for name in dice.choices(names, k=dice.randint(0, 2)):
            seen = ENCODINGS[name](seen)
        kept = withhold(f'{{"a": "{seen}", "b": [1.50, "x"]}}', (TOKEN,))
        assert WITHHELD in kept, seen
        assert not is_told(kept, TOKEN)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_part_of_eight_letters_is_found(encoding: str) -> None:
    assert is_told(f"x: {ENCODINGS[encoding](TOKEN)}", TOKEN), "the judge itself sees it"
    for begin in range(0, 25, examples(4, 1)):
        for length in (PART, PART + 1, 12, 32):
            part = TOKEN[begin : begin + length]
            if len(letters(part)) >= PART:
                kept = withhold(f"<{ENCODINGS[encoding](part)}>", (TOKEN,))
                assert WITHHELD in kept
                assert not is_told(kept, TOKEN)


def test_where_a_text_was_cut_or_will_be_no_more_than_seven_are_left() -> None:
    for cut in range(1, 40):
        assert not is_told(withhold(f"you sent {TOKEN} and"[:-cut], (TOKEN,)), TOKEN)
    for before in range(480, 500):
        assert not is_told(
            clean_of_secrets(f"Error: {'x' * before} {TOKEN}", (TOKEN,))[:500], TOKEN
        )


@pytest.mark.parametrize("user", ["", "u", "us", "use", "user"])
@pytest.mark.parametrize("password", ["correct-horse-battery", "abcde", "sh0rt!x"])
def test_the_password_of_basic_authentication_is_found_whatever_the_user(
    user: str, password: str
) -> None:
    pair = b64encode(f"{user}:{password}".encode()).decode()
    kept = withhold(f"Basic {pair} was refused, sorry", (password,))
    assert kept.startswith(WITHHELD)
    assert kept.endswith(" refused, sorry")


@pytest.mark.parametrize(
    ("value", "piece"),
    [
        ("Bearer abcdef123", "abcdef123"),
        ("https://hooks.example.com/services/T0/B0/xyz", "/services/T0/B0/xyz"),
        ("https://hooks.example.com/services/T0/B0/xyz", "hooks.example.com"),
        ("https://hooks.example.com:8443/services/T0/B0/xyz", "hooks.example.com"),
        ("https://hooks.example.com:8443/services/T0/B0/xyz", "hooks.example.com:8443"),
        ("https://user:abcdef123@api.example.com/", "abcdef123"),
        ("https://api.example.com/v1?key=abcdef123", "abcdef123"),
        ("https://api.example.com/v1?key=abcdef123", "/v1?key=abcdef123"),
        ("abcdef123\n", "abcdef123"),
        ("abcd\n", "abcd"),
        ("-----BEGIN KEY-----\nMIIE12345678\n-----END KEY-----", "MIIE12345678"),
    ],
)
def test_the_parts_that_are_told_on_their_own_are_as_secret(value: str, piece: str) -> None:
    assert withhold(f"<{piece}>", (value,)) == WITHHELD


# --- What is not


def test_a_short_value_is_found_only_where_it_stands_alone() -> None:
    told = ["id=42", "(42)", "42", "a 42_a", '{"id": 42}']
    assert [text for text in told if not tells(text, ("42",))] == []
    assert not tells("n=1429 x42 42a", ("42",))
    assert tells("a 12345 b", ("1234",))


AROUND = (
    "Bearer abcdefgh12345678",
    "https://hooks.example.com/services/T0/B0/xyzxyz",
    "-----BEGIN PRIVATE KEY-----\nMIIE12345678\n-----END PRIVATE KEY-----",
)


@pytest.mark.parametrize(
    "values", [(), ("",), ("secret-value",), ("a.b*c",), ("\\\\\\\\",), AROUND]
)
@pytest.mark.parametrize(
    "text",
    ["", "nothing here, aXbc", '{"a": 1}', "100%\\u00", "&&#;%%25",
     "Bearer tokens, https://other.example.org/, -----BEGIN CERTIFICATE-----"],
)  # fmt: skip
def test_everything_else_is_left(text: str, values: tuple[str, ...]) -> None:
    """What surrounds a value tells nothing."""
    assert withhold(text, values) == text


def test_no_false_alarm_in_prose() -> None:
    words = "the payment was refused because no account of this customer was found in production"
    text, dice = f"{words}, see 4f9c2a17-1f3e-4d0a-9c55-2d8b0f6f1d22\n" * 50, random.Random(3)
    for _ in range(200):
        value = "".join(dice.choices("ABCDEFGHabcdefghijklmnopqrstuvwxyz0123456789", k=24))
        assert not tells(text, (value,))


# --- What is withheld


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"a": "no TOKEN!", "b": [1.50, "x"]}', '{"a": "WITHHELD", "b": [1.50, "x"]}'),
        ('{"TOKEN": 1e3, "b": {"c": null}}', '{"WITHHELD": 1e3, "b": {"c": null}}'),
        ('[{"a": "TOKEN"}, {"a": "TOK', '[{"a": "WITHHELD"}, {"a": "TOK'),
        ('["sk_live", "_4eC39H", "qLyjWDa"]', "WITHHELD"),
        ("ConnectionError: no route with k=TOKEN", "ConnectionError: no route with WITHHELD"),
        ("GET http://h.example/a?b=1&k=TOKEN&c=2 3", "GET http://h.example/a?b=WITHHELD=2 3"),
        ("first\nTOKEN\nlast\nand on", "WITHHELD\nand on"),
        ("a line\nsk_live _4eC3 9HqL yjWD arjt\nnext\nand on", "WITHHELD\nand on"),
        ("sk_li\nve_4e\nC39Hq\nLyjWD", "WITHHELD"),
    ],
)
def test_a_string_a_word_or_a_line_is_withheld(text: str, kept: str) -> None:
    text, kept = text.replace("TOKEN", TOKEN), kept.replace("WITHHELD", WITHHELD)
    assert withhold(text, (TOKEN,)) == kept
    value = "correcthorse battery staple"
    assert withhold(f"it was {value}, you see", (value,)) == f"it {WITHHELD} you see"


# --- What it costs


@pytest.mark.parametrize("flood", [
    "\\", "%25", "&#0", "%2", "/", "\\\\u00", "&amp;", "&amp", "amp;", "\\\\n", "%25%", "a", "sk_l", "%73", "&#115;", "c2tf",
    "\r\n", "=", '"', '\\"', "{", "1", "[1,", "\xc3", "\ud800", "736b5f6c69766x",
])  # fmt: skip
def test_no_answer_takes_long(flood: str) -> None:
    began = time.thread_time()
    withhold((flood * 262_144)[:262_144], (TOKEN, "/\\/ secret%&", "\\" * 30 + "x\\\\y"))
    withhold(f"{(flood * 65_536)[:65_536]} {TOKEN}", (TOKEN,))
    assert time.thread_time() - began < 5


def test_a_long_key_is_quick() -> None:
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC+/\n" * 50
    assert withhold(json.dumps({"k": key}), (key,)) == json.dumps({"k": WITHHELD})


# --- Errors


def test_a_payload_is_taken_out_in_whatever_form_an_error_repeats_it() -> None:
    name, text = "patient\nzero 'A'", "lorem ipsum " * 100
    payload = payload_strings("sms", {"name": name, "long": text, "few": "abc"})
    for form in (name, repr(name), str(KeyError(name)), json.dumps(name), ascii(name),
                 html.escape(name), quote(name)):  # fmt: skip
        assert "zero" not in clean_of_secrets(f"no such {form}", (), payload)
    assert "lorem" not in clean_of_secrets(f"ValueError: {text[7:500]}", (), payload)
    cut = clean_of_secrets(f"{text[7:500]} {text[3:900]}", (), payload)
    assert cut == "[payload] [payload]"
    few = "abc is no payload that tells something"
    assert clean_of_secrets(few, (), payload) == few


def test_a_text_without_end_is_looked_at_from_both_ends_and_no_half_is_left() -> None:
    payload = payload_strings("sms", {"name": "Zero Patient"})
    said = clean_of_secrets(f"no Zero Patient {TOKEN} Zero Patient there is", (TOKEN,), payload)
    assert "Zero" not in said and "Patient" not in said
    text = clean_of_secrets(f"{TOKEN} {'x' * 10_000_000} {TOKEN}", (TOKEN,))
    assert len(text) < 200_000
    assert "sk_live" not in text
    assert clean_of_secrets(f"first{'x' * 1_000_000}last", ()).endswith("xlast")


@pytest.mark.parametrize("name", ["celery.app.trace", "urllib3.connection", "urllib3.connectionpool"])  # fmt: skip
def test_others_log_nothing_secret_while_a_call_is_made_and_what_they_like_after(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(name)
    caplog.set_level(logging.DEBUG, logger=name)
    with withholding((TOKEN,)):
        extra = {"data": {"args": [f"({TOKEN!r},)"]}}
        logger.warning("sent %(token)s", {"token": TOKEN}, extra=extra)
        logger.warning("sent", extra={"data": {"args": [TOKEN]}})
        logger.warning("%d is not a number", TOKEN)
        try:
            raise ConnectionError(f"no route with {TOKEN}")
        except ConnectionError:
            logger.exception("it failed")
        logger.warning("%d is not a number", "text")
        logger.warning("x" * 100_000)
        logger.warning("all is well after %d", 3)
    logger.warning("sent %s", TOKEN)
    assert caplog.messages == ["all is well after 3", f"sent {TOKEN}"]
