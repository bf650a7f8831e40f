"""Scrubbing: takes secrets, and a call's own strings, out of texts. First scrub, then cut, then
keep or log.

Texts and the values to look for enter; texts without them leave. A text is read as it stands and as
whoever wrote it may have encoded it, so what is found is the value in whatever spelling, and any
part of it that is 8 characters or longer. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from callqueue.security import needles
from callqueue.security.matching import replaced, spans
from callqueue.security.redaction import redact_text
from callqueue.security.secrets import walked
from callqueue.texts import storable

SCRUBBED = "[secret]"
PAYLOAD = "[payload]"
TELLING = 6  # characters from which on a string of a payload tells something
_LONGEST = 65536  # characters at each end of an error's text that are looked at
_PLAIN = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]{0,39}")
_AFTER_HOST, _ROUTE = re.compile(r"[/?#&=;]"), re.compile(r"[a-z]*")
_WIDEST = 16  # characters that one character may become in some encoding
_TASKS = ("celery_task", "django_task")


def scrub(text: str, values: Iterable[str], upto: int | None = None) -> str:
    """`text` with "[secret]" for every value, and for any 8 characters of one, however encoded on
    their way back; of its first `upto` characters, where a value that begins in them is taken out
    whole if `room_for` more are there.

    Found are: the value itself; percent-encoded (any of its characters, either case, several times
    over), "+" for a space; JSON's, JavaScript's and Python's escapes, as in a value's repr; HTML's
    entities; its UTF-8 read as Latin-1; any mixture of these; base64 of it at any offset and broken
    into lines, which covers a basic-auth header whatever the user; and hex. Of a URL that is a
    value also its host, path and query. A value of fewer than 8 characters is found whole, one of
    fewer than 4 only where no letter or digit touches it: `42` is scrubbed in "id=42", not in
    "1429".
    """
    wanted = needles.wanted(tuple(values))
    if wanted is None or not text:
        return text[:upto]
    found = spans(text, wanted)
    if upto is not None:
        found = ((begin, end) for begin, end in found if begin < upto)
    return replaced(text[:upto], found, SCRUBBED)


def scrub_json(value: Any, values: Iterable[str]) -> Any:
    """A copy of a JSON value with every string and every name scrubbed."""
    texts = tuple(values)
    if not texts or not holds("\n".join(_strings(value, with_names=True)), texts):
        return value
    if isinstance(value, str):
        return scrub(value, texts)
    if isinstance(value, Mapping):
        return {scrub(str(name), texts): scrub_json(item, texts) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_json(item, texts) for item in value]
    return value


def holds(text: str, values: Iterable[str]) -> bool:
    """Whether there is anything in the text that `scrub` would take out."""
    wanted = needles.wanted(tuple(values))
    return wanted is not None and next(spans(text, wanted), None) is not None


def room_for(values: Iterable[str]) -> int:
    """How many characters a value may take in a text: so many are to be read beyond those that are
    kept.
    """
    return max(map(len, values), default=0) * _WIDEST


def clean(text: str, values: Iterable[str], payload: Sequence[str] = ()) -> str:
    """An error's text as it may be kept and logged: without these values, these strings of a
    payload, and what looks like a credential. Cut it afterwards, not before.
    """
    if not text:
        return text
    if len(text) > 2 * _LONGEST:
        text = f"{text[:_LONGEST]} ... {text[-_LONGEST:]}"
    text = scrub(text, values)
    if payload:
        text = replaced(text, spans(text, needles.of_payload(payload)), PAYLOAD)
    return storable(redact_text(text))


def payload_of(method: str, params: Any) -> list[str]:
    """The strings in a call's params that tell something: values, and names that are more than a
    word; of a task, those of its arguments; of a URL, what follows its host.
    """
    found: list[str] = []
    if isinstance(params, Mapping):
        if method in _TASKS:
            params = [params.get("args"), params.get("kwargs")]
        elif isinstance(url := params.get("url"), str):
            found = _AFTER_HOST.split(url.partition("://")[2])[1:]
            found = [piece for piece in found if not _ROUTE.fullmatch(piece)]
            params = {**params, "url": None}
    found += _strings(params)
    named = (value for value in walked(params) if isinstance(value, Mapping))
    found += (name for value in named for name in map(str, value) if not is_plain(name))
    return sorted({text for text in found if len(text) >= TELLING}, key=len, reverse=True)


def is_plain(name: str) -> bool:
    """Whether a name in a payload is a word, which tells nothing of whom it is about."""
    return _PLAIN.fullmatch(name) is not None


def _strings(value: Any, *, with_names: bool = False) -> Iterator[str]:
    return (text for text in walked(value, with_names=with_names) if isinstance(text, str))
