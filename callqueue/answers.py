"""What is kept of an answer, and what a program reads of it: text for a column with its form, by
which the same bytes come back, and the Answer. A body that is text stays readable in the table.
"""

from __future__ import annotations

import codecs
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.datastructures import CaseInsensitiveMapping

from callqueue import texts
from callqueue.exceptions import AnswerCut

# Forms of a column's text: what came in UTF-8, or in the charset that the form names, as text;
# anything else in base64. The others give no bytes back.
UTF_8, BASE64 = "", "base64"
SCRUBBED, SCRUBBED_CUT = "scrubbed", "scrubbed, cut"
WITHHELD = "withheld"

_WITHHELD = "the answer is not kept: it could not be cleaned in time, stored or decrypted"
_CUT = (
    "{kept} of {size} bytes of the answer are kept: raise KEEP_RESPONSE_BYTES, or the rule's"
    " keep_response_bytes; what is past MAX_RESPONSE_BYTES, or never came, is not there to be kept"
)
_SCRUBBED = (
    "the answer of {size} bytes held a secret of the call, so {kept} bytes without it are kept;"
    " json(scrubbed=True) reads those"
)


@dataclass(frozen=True)
class Answer:
    """What an attempt was answered, as far as kept. Of a handler: what it returned, as JSON."""

    status: int | None
    headers: Mapping[str, str] = field(repr=False)  # know no case; telling ones are redacted
    body: bytes = field(repr=False)  # as it came, decoded as Content-Encoding says
    text: str = field(repr=False)
    size: int  # bytes that came; one more, where reading stopped before the end
    is_cut: bool  # less is kept
    is_scrubbed: bool = False  # a secret was taken out: body and text are not what came
    form: str = field(default=UTF_8, repr=False)  # of the column that it was read from

    def json(self, *, scrubbed: bool = False) -> Any:
        """The body as JSON. AnswerCut: less is kept, or it is scrubbed and `scrubbed` is False."""
        if self.form == WITHHELD:
            raise AnswerCut(self.size, 0, _WITHHELD)
        if self.is_cut:
            raise AnswerCut(self.size, len(self.body), _CUT)
        if self.is_scrubbed and not scrubbed:
            raise AnswerCut(self.size, len(self.body), _SCRUBBED)
        if self.status is None and not self.body:
            return None  # a handler that returned nothing
        # json finds UTF-8, 16 and 32 in bytes by itself; any other charset was the answer's to name
        return json.loads(self.body if self.form in (UTF_8, BASE64) else self.text)


def answer_of(attempt: Any, unreadable: Mapping[str, str]) -> Answer | None:
    """An attempt's answer; None: it has none. `unreadable`: what stands where decryption failed."""
    if attempt.response_size is None:
        return None
    text, form = attempt.response_body, attempt.response_form
    if unreadable in (attempt.response_headers, {"$unreadable": text}):
        text, form = "", WITHHELD
    headers = CaseInsensitiveMapping(attempt.response_headers or {})
    body = unpack_body(text, form)
    is_scrubbed = form in (SCRUBBED, SCRUBBED_CUT)
    return Answer(
        status=attempt.response_status,
        headers=headers,
        body=body,
        text=texts.decoded(body, None) if form in (BASE64, WITHHELD) else text,
        size=attempt.response_size,
        is_cut=form in (SCRUBBED_CUT, WITHHELD)
        or (not is_scrubbed and len(body) < attempt.response_size),
        is_scrubbed=is_scrubbed,
        form=form,
    )


def pack_body(content: bytes, charset: str | None, *, is_cut: bool) -> tuple[str, str]:
    """The bytes as text, and its form. If they are cut, a last character that is not whole is left
    off. As in `texts.decoded`, a claim of Latin-1 is the last codec tried; then base64.
    """
    claimed = texts.codec_of(charset)
    first = "utf-8" if claimed == "latin-1" else claimed
    if first == "utf-8" and content.isascii() and b"\0" not in content:  # as most are
        return content.decode("ascii"), UTF_8
    for codec in dict.fromkeys((first, claimed, "utf-8")):
        text = _exact_text(content, codec, is_cut)
        if text is not None:
            return text, UTF_8 if codec == "utf-8" else codec
    return b64encode(content).decode("ascii"), BASE64


def unpack_body(text: str, form: str) -> bytes:
    """The bytes that `pack_body` was given; those of a scrubbed text; of what is withheld, none."""
    if form == BASE64:
        return b64decode(text)
    codec = "utf-8" if form in (UTF_8, SCRUBBED, SCRUBBED_CUT) else form
    return b"" if form == WITHHELD else text.encode(codec, "replace")


def _exact_text(content: bytes, codec: str, is_cut: bool) -> str | None:
    """The text that every database keeps, and that gives these bytes back; None: there is none."""
    try:
        text = codecs.getincrementaldecoder(codec)("strict").decode(content, final=not is_cut)
        again = text.encode(codec)
    except UnicodeError:
        return None
    is_same = content.startswith(again) if is_cut else content == again
    is_near = len(content) - len(again) < 8  # bytes of a character that is not whole
    return text if is_same and is_near and texts.storable(text) == text else None
