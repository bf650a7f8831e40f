"""The old module as the judge of the new one: `python -m tests.unit.security.judge 100000 [SEED]`.

Random secrets, in encodings and encodings of encodings, in texts of several kinds. Nothing that the
old module finds may be left by the new one, but parts with fewer than 8 ASCII letters or digits.
"""

from __future__ import annotations

import base64
import html
import json
import random
import re
import string
import sys
from collections import Counter
from collections.abc import Callable
from urllib.parse import quote, quote_plus

from callqueue.security import needles, scrubbing, withholding
from callqueue.security.matching import spans
from callqueue.security.readings import Reading, decoded_text

ALNUM = string.ascii_letters + string.digits
FOREIGN = "äöüßé€абвгд日本😀"


def units(text: str) -> list[int]:
    raw = text.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "quoted": lambda v: quote(v, safe=""),
    "form": quote_plus,
    "percent": lambda v: "".join(f"%{byte:02x}" for byte in v.encode()),
    "percent twice": lambda v: "".join(f"%25{byte:02X}" for byte in v.encode()),
    "json": json.dumps,
    "repr": repr,
    "\\u": lambda v: "".join(f"\\u{unit:04x}" for unit in units(v)),
    "\\x": lambda v: "".join(f"\\x{byte:02x}" for byte in v.encode()),
    "html": html.escape,
    "decimal": lambda v: "".join(f"&#{ord(char)};" for char in v),
    "hexadecimal": lambda v: "".join(f"&#x{ord(char):x};" for char in v),
    "base64": lambda v: b64(v.encode()),
    "base64 inside": lambda v: b64(b"user:" + v.encode() + b"!!"),
    "base64 for urls": lambda v: base64.urlsafe_b64encode(b"x" + v.encode()).decode(),
    "mime": lambda v: base64.encodebytes(b"ab" + v.encode() * 2).decode(),
    "short lines": lambda v: "\r\n".join(re.findall(".{1,6}", b64(v.encode()))),
    "hex": lambda v: v.encode().hex(),
    "HEX": lambda v: v.encode().hex().upper(),
    "read as latin-1": lambda v: v.encode().decode("latin-1"),
}
TEXTS = (
    "error: {} was refused",
    '{"echo": {}, "ok": true}',
    '{"echo": "{}", "ok": true}',
    "line one\nkey={}\nline three",
    "{}",
)


class Texts:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def of(self, letters: str, least: int, most: int | None = None) -> str:
        return "".join(self.random.choices(letters, k=self.random.randint(least, most or least)))

    def secret(self) -> str:
        pem = "\n".join(self.of(ALNUM + "+/", 64) for _ in range(3))
        return self.random.choice((
            f"sk_live_{self.of(ALNUM, 24)}",
            self.of(ALNUM + "+/=-_.~!@#$%^&*() \"'<>\\", 30),
            f"Bearer {self.of(ALNUM + '._-', 40)}",
            f"https://hooks.example.com/T0/{self.of(ALNUM, 20)}",
            f"https://api.example.com/v1?key={self.of(ALNUM, 12)}",
            f"-----BEGIN KEY-----\n{pem}\n-----END KEY-----",
            self.of(ALNUM + "äöüßé€", 16),
            self.of(ALNUM, 4, 7),
            self.of(FOREIGN, 4, 11),
            self.of("+/=-_.~!@#$%^&*()<>\\\"' ", 4, 11),
            self.of(ALNUM + "+/", 8, 13),
        ))  # fmt: skip

    def encoding(self, probability: float) -> str:
        is_there = self.random.random() < probability
        return self.random.choice([*ENCODINGS]) if is_there else "plain"


def few(text: str) -> bool:
    return len(re.findall("[0-9A-Za-z]", text)) < withholding.PART


def main(count: int, seed: int) -> int:
    texts, found, left, excepted = Texts(seed), 0, Counter[tuple[str, ...]](), 0
    for _ in range(count):
        secret = texts.secret()
        begin = texts.random.randrange(max(1, len(secret) - 8))
        is_part = texts.random.random() < 0.1
        told = secret[begin : begin + texts.random.randint(8, 40)] if is_part else secret
        kinds = (texts.encoding(0.95), texts.encoding(0.4), texts.encoding(0.1))
        for kind in kinds:
            told = ENCODINGS[kind](told)
        text = texts.random.choice(TEXTS).replace("{}", told)
        kept = withholding.withhold(text, (secret,))
        found += kept != text
        wanted = needles.wanted((secret,))
        assert wanted is not None
        if scrubbing.holds(kept, (secret,)):
            parts = (decoded_text(Reading.of(kept[a:b]).text) for a, b in spans(kept, wanted))
            if all(map(few, parts)) and (is_part or not (few(secret) or kept == text)):
                excepted += 1
            else:
                left[*kinds] += 1
                print(repr(secret), repr(text), repr(kept))
    print(f"{count} texts, {found} of them told; left {left.total()} {dict(left)}")
    print(f"parts of fewer than 8 ASCII letters and digits, which are not looked for: {excepted}")
    return left.total()


if __name__ == "__main__":
    numbers = [*map(int, sys.argv[1:]), 1]
    sys.exit(main(numbers[0], numbers[1]) > 0)
