"""What is kept of an answer: its headers and the beginning of its body, with nothing secret in it.

In: a result, with the secrets of its call, in the thread that made the call. Out: what the
attempt's columns hold, which whoever records only writes. What is looked at is cut first, so the
work has a bound in bytes; its bound in time is its `Allowance`. What is kept is cut last, so that
no half of a secret or of a credential is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from callqueue import answers, clocks, conf, states, texts
from callqueue.answers import packed
from callqueue.security.redaction import REDACTED, redact_headers
from callqueue.security.withholding import WITHHELD, Allowance, TooDear, holds, spend, withhold
from callqueue.transitions import Result

MOST_HEADERS, LONGEST_NAME, LONGEST_VALUE = 100, 200, 2000
MOST_OF_HEADERS = 32768  # characters of all headers that are looked at
EDGE = 1024  # characters, the end of which may be half of what redaction takes out
LONGEST_SIZE = 2**31 - 1
_WIDE = ("utf-16", "utf-32")
NOT_KEPT = "[not kept: cleaning it took too long]"
NOTHING: Mapping[str, Any] = {
    "response_status": None,
    "response_headers": None,
    "response_body": "",
    "response_form": "",
    "response_size": None,
}


def keep(result: Result, values: tuple[str, ...], clean: Callable[[str], str]) -> None:
    """Clean the result's texts with `clean`, and compose the columns of what was answered."""
    job = result.job
    with Allowance(job.rule_name, (job.lease_ends - clocks.monotonic()) / 2):
        hold = result.hold or {"reason": ""}
        said = {result.error, result.why, hold["reason"]} - {""}
        cleaned = {"": "", **{text: _affordable(clean, text) for text in said}}
        result.error, result.why = cleaned[result.error], cleaned[result.why]
        hold["reason"] = cleaned[hold["reason"]]
        try:
            result.kept = _columns(result, values)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # of a response that a hook has changed
            unstorable(result, error)


def unstorable(result: Result, error: Exception) -> None:
    """Keep nothing of the answer but its status, since this error kept it from being stored."""
    status = getattr(result.response, "status_code", None)
    why = f"what it said could not be stored ({type(error).__name__})"
    result.kept, result.error, result.why = NOTHING, why, why if result.why else ""
    if isinstance(status, int) and 100 <= status < 1000:
        was_there = {"response_headers": {}, "response_form": answers.WITHHELD, "response_size": 0}
        result.kept = {**NOTHING, "response_status": status, **was_there}
    if result.hold is not None:
        result.hold["reason"] = why


def _affordable(clean: Callable[[str], str], text: str) -> str:
    try:
        return clean(text)
    except TooDear:
        return NOT_KEPT


def _columns(result: Result, values: tuple[str, ...]) -> Mapping[str, Any]:
    response = result.response
    if response is None:
        if result.outcome != states.SUCCEEDED:
            return NOTHING
        return {**NOTHING, **_body(_as_json(result.value), "utf-8", result, values)}
    try:
        headers = _headers(response.headers, values)
    except TooDear:
        headers = {}
    return {
        "response_status": response.status_code,
        "response_headers": headers,
        **_body(response.content or b"", response.encoding, result, values),
    }


def _headers(given: Mapping[str, Any], values: tuple[str, ...]) -> dict[str, str]:
    """The headers: cut, cleaned, and cut again."""
    kept, long, size = dict[str, str](), set[str](), 0
    for name, value in islice(given.items(), MOST_HEADERS):
        name, text = str(name)[: LONGEST_NAME + EDGE], str(value)
        is_long, text = len(text) > LONGEST_VALUE + EDGE, text[: LONGEST_VALUE + EDGE]
        if size + len(name) + len(text) > MOST_OF_HEADERS:
            continue
        size += len(name) + len(text)
        kept[name] = text
        if is_long:
            long.add(name)
    spend(size)
    if values and holds("\n".join([*kept, *kept.values()]), values):
        long = {withhold(name, values) for name in long}
        kept = {withhold(name, values): withhold(text, values) for name, text in kept.items()}
    kept = redact_headers(kept)
    for name in long & {name for name, text in kept.items() if text not in (REDACTED, WITHHELD)}:
        kept[name] = kept[name][:-EDGE]
    return {name[:LONGEST_NAME]: text[:LONGEST_VALUE] for name, text in kept.items()}


def _body(
    content: bytes, charset: str | None, result: Result, values: tuple[str, ...]
) -> dict[str, Any]:
    """The columns of a body. One that is cut is told of in the attempt's text."""
    most = conf.current().keep(result.job.rule)
    size = min(len(content) + (not result.is_whole), LONGEST_SIZE)
    columns = {"response_size": size}
    try:
        text = _without_secrets(content, charset, most, values)
    except TooDear:
        return {**columns, "response_body": NOT_KEPT, "response_form": answers.WITHHELD}
    is_cut = len(content) > most or not result.is_whole
    if text is None:
        text, form = packed(content[:most], charset, is_cut=is_cut)
    else:
        text = text.encode()[:most].decode("utf-8", "ignore")
        form = answers.SCRUBBED_CUT if is_cut else answers.SCRUBBED
    if len(content) > most > 0:
        note = f"{most} of {size} bytes of the answer are kept"
        result.error = f"{result.error}; {note}" if result.error else note
    return {**columns, "response_body": text, "response_form": form}


def _without_secrets(
    content: bytes, charset: str | None, most: int, values: tuple[str, ...]
) -> str | None:
    """The beginning of the body as text without secrets; None where there is none in it."""
    if not values:
        return None
    start = content[: most + EDGE]
    text = texts.decoded(start, charset)
    is_told = holds(text, values)
    # letters of a charset that is falsely claimed would be the secret's bytes, two or four in one
    if not text.isascii() and (not is_told or texts.charset(charset).startswith(_WIDE)):
        as_it_stands = texts.storable(start.decode("latin-1"))
        if holds(as_it_stands, values):
            text, is_told = as_it_stands, True
    return withhold(text, values) if is_told else None


def _as_json(value: Any) -> bytes:
    """What a handler returned, as JSON, or its repr where it has no such form (a loop)."""
    if value is None:
        return b""
    try:
        return json.dumps(value, default=str).encode()
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value)).encode()
