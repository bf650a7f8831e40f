"""What failed lately under a rule, grouped by what was answered."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from datetime import datetime

from callqueue import states, tables
from callqueue.security.redaction import redact_text

STATUSES = (states.FAILED, states.ERROR, states.UNKNOWN)  # of calls that failed
NEWEST = 5000  # calls of each status that are looked at
COMPARED = 300  # characters of a text by which it is told from others
REDACTED = 2000  # characters of a text that are looked at for what is secret, before it is shown
MOST = 50  # groups that are listed, the largest
# What may differ from call to call in a text that says the same: ids, long numbers, durations. An
# address is no duration.
_OWN = re.compile(r"\b[0-9a-f-]{8,}\b|\b\d{4,}\b|(?<![\w.])\d+\.\d+\b(?!\.\d)")


@dataclass
class ErrorGroup:
    """Calls of one status that failed alike."""

    status: int
    digest: str  # tells it from others
    message: str  # of the newest
    pks: list[int] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    last: datetime | None = None  # when the last one failed


def read_groups(using: str, rule: str) -> tuple[list[ErrorGroup], bool]:
    """Groups of a rule's NEWEST failed calls a status, the largest first; are there more calls?"""
    found: dict[tuple[int, str], ErrorGroup] = {}
    is_partial = False
    for status in STATUSES:
        rows = tables.calls(using).filter(rule=rule, status=status).order_by("-pk")
        # one that is retried has not ended: it failed soon after it was released
        at = "dispatched_at_dt" if status == states.ERROR else "finished_at_dt"
        newest = list(rows.values_list("pk", "key", "error_message", at)[: NEWEST + 1])
        is_partial |= len(newest) > NEWEST
        for pk, key, message, ended in newest[:NEWEST]:
            text = text_in_common(message)
            one = found.setdefault(
                (status, text),
                ErrorGroup(status, _digest_of_group(status, text), message, last=ended),
            )
            one.pks.append(pk)
            one.keys.add(key)
            one.last = max(filter(None, (one.last, ended)), default=None)
    return sorted(found.values(), key=lambda one: -len(one.pks)), is_partial


def read_pks(using: str, rule: str, digest: str) -> list[int]:
    """The pks of a group's calls, be it still among the MOST largest or not; [] if it is gone."""
    found, _is_partial = read_groups(using, rule)
    return next((one.pks for one in found if one.digest == digest), [])


def message_to_show(message: str) -> str:
    """What a text says, redacted before it is cut: a part of a secret does not look like one."""
    return text_in_common(redact_text(message[:REDACTED]))


def text_in_common(message: str) -> str:
    """The beginning of the text, without what differs from call to call."""
    text = message[:COMPARED]
    return _OWN.sub(lambda own: "…" if any(map(str.isdecimal, own[0])) else own[0], text)


def _digest_of_group(status: int, text: str) -> str:
    return hashlib.sha256(f"{status} {text}".encode()).hexdigest()[:16]
