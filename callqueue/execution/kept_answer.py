"""What is kept of an answer: its headers and the beginning of its body, with nothing secret in it.

In: a result, with the secrets of its call. Out: what the attempt's columns hold. Whatever is cut is
cut after it was scrubbed, so that no half of a secret is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from callqueue import conf
from callqueue.security.redaction import redact_headers
from callqueue.security.scrubbing import room_for, scrub, scrub_json
from callqueue.texts import decoded
from callqueue.transitions import Result

MOST_HEADERS, LONGEST_NAME, LONGEST_VALUE = 100, 200, 2000
TRIES = 4  # readings of a body, each twice as long, before the scrubbed beginning is short


def headers(result: Result) -> dict[str, str]:
    """The answer's headers: scrubbed, redacted, and only then cut."""
    listed = list(result.response.headers.items())[:MOST_HEADERS]
    texts = {str(name): str(value) for name, value in listed}
    clean = redact_headers(scrub_json(texts, result.secret_values))
    return {name[:LONGEST_NAME]: str(value)[:LONGEST_VALUE] for name, value in clean.items()}


def body(result: Result) -> str:
    """The beginning of the response's body, or of what a handler returned, as text."""
    most = conf.current().keep_response_bytes
    if result.response is None:
        if result.value is None:
            return ""
        return scrub(_as_text(result.value), result.secret_values)[:most]
    content, encoding = result.response.content or b"", result.response.encoding
    text = _scrubbed_start(
        lambda size: decoded(content[:size], encoding), len(content), most, result.secret_values
    )
    return text.encode()[:most].decode("utf-8", "ignore")


def _scrubbed_start(
    read: Callable[[int], str], size: int, most: int, secret_values: tuple[str, ...]
) -> str:
    """The beginning of a text of `size` bytes, scrubbed: at least `most` characters of it where it
    has so many.

    What is taken out draws the end of what was read into what is kept, where half a secret may be:
    that end is left off, and more is read instead, if not without end.
    """
    room = room_for(secret_values)
    wanted, kept = most + room, ""
    for _ in range(TRIES):
        text = read(wanted)
        kept = scrub(text, secret_values)
        if wanted >= size or kept == text:
            return kept
        kept = kept[:-room]
        if len(kept) >= most:
            return kept
        wanted *= 2
    return kept


def _as_text(value: Any) -> str:
    """What a handler returned, as JSON, or its repr where it has no such form (a loop)."""
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value))
