"""Text as every database keeps it, whoever wrote it; never raises, and looks up no codec by a name
that a stranger chose. Also names: suggested for unknown ones, of documentation pages, this host's.
"""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Iterable, Mapping
from encodings.aliases import aliases
from functools import lru_cache
from pathlib import Path
from typing import Any

LONGEST_LABEL = 40  # characters of a charset's name that are looked at
_CHARSETS = frozenset({
    *(f"cp125{n}" for n in range(9)),
    *(f"iso8859_{n}" for n in range(2, 17) if n != 12),
    "ascii", "latin_1", "utf_8", "utf_8_sig",
    "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le",
    "big5", "big5hkscs", "cp950", "gb18030", "gb2312", "gbk", "hz",
    "cp932", "euc_jis_2004", "euc_jp", "iso2022_jp", "shift_jis", "shift_jis_2004",
    "cp874", "cp949", "euc_kr", "iso2022_kr", "johab", "tis_620",
    "cp437", "cp850", "cp852", "cp855", "cp866", "koi8_r", "koi8_u",
    "mac_cyrillic", "mac_roman", "ptcp154",
})  # fmt: skip


def storable(text: str) -> str:
    """The nearest text that every database keeps: no NUL, surrogates joined or, alone, U+FFFD."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "")


def storable_json(value: Any) -> Any:
    """A JSON value whose texts, names too, are the nearest that every database keeps."""
    if isinstance(value, str):
        return storable(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {storable_json(name): storable_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable_json(item) for item in value]
    return value


def worded(error: BaseException) -> str:
    """What was raised, as "Type: its words". One whose words cannot be had has none."""
    said = _said_by(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _said_by(error: BaseException) -> str:
    try:
        return storable(str(error))
    except BaseException:
        return ""


def worded_reason(why: object) -> str:
    """The reason a hook or a program gave, whatever it is: of an error `worded`, "" of None."""
    if isinstance(why, BaseException):
        return worded(why)
    try:
        return "" if why is None else str(why)
    except BaseException:
        return type(why).__name__


def in_one_line(error: BaseException) -> str:
    """What was raised in its own words, in one line of at most 300 characters, or its type."""
    return " ".join(_said_by(error).split())[:300] or type(error).__name__


def host_name() -> str:
    """This host's name, as the names of dispensers begin."""
    return storable(socket.gethostname())[:100]


def documentation_page(name: str) -> str:
    """Where a page of the documentation is: in the package or the checkout; else its name."""
    package = Path(__file__).resolve().parent
    for folder in (package / "docs", package.parent / "docs"):
        if (folder / name).exists():
            return str(folder / name)
    return f"docs/{name} of django-callqueue"


@lru_cache(maxsize=256)
def codec_of(label: str | None) -> str:
    """The codec that a charset's label names, one of a fixed list; utf-8 for any other."""
    if label is None or len(label) > LONGEST_LABEL:
        return "utf-8"
    name = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")
    name = aliases.get(name, name)
    return name.replace("_", "-") if name in _CHARSETS else "utf-8"


def decoded(raw: bytes, label: str | None) -> str:
    """A body's text in the charset that its answer claims; Latin-1, the default, as utf-8."""
    codec = codec_of(label)
    return storable(raw.decode("utf-8" if codec == "latin-1" else codec, "replace"))


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal of an unknown name: "; did you mean 'x'?" where a known name is near,
    else the names there are, 12 of them and how many more.
    """
    names = sorted(known)
    if near := nearest_name(name, names):
        return f"; did you mean {near!r}?"
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return f"; there are {', '.join(map(repr, names[:12]))}{more}" if names else ""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like this one's first 100 characters, letter case apart, or None."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name[:100].casefold(), folded, n=1, cutoff=0.5)
    return folded[near[0]] if near else None
