"""Checks of URLs: how they are written, and whether they lead where calls may go."""

from __future__ import annotations

import re
from dataclasses import dataclass

from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.security.addresses import Unreadable, place_of, place_refusal
from callqueue.sending.validation.refusals import kind_of

FIELD = "params.url"
_UNSAFE_IN_URL = re.compile(
    r"[\x00-\x20\x7f-\xa0\\\u1680\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]"
)


@dataclass(frozen=True)
class Reach:
    """Where calls may go: ALLOWED_HOSTS and ALLOWED_NETWORKS."""

    hosts: tuple[str, ...]
    networks: tuple[str, ...]


def check_url(url: object, reach: Reach) -> tuple[str, int]:
    """The host and port of an http(s) URL that may be called; the host is lower-case ASCII, and is
    not resolved.
    """
    if not isinstance(url, str) or not url:
        raise InvalidCall(FIELD, f"must be an http or https URL, not {kind_of(url)}")
    if _UNSAFE_IN_URL.search(url):
        raise InvalidCall(
            FIELD, "contains white space, a control character or a backslash; percent-encode it"
        )
    try:
        place = place_of(url)
    except Unreadable as error:
        raise InvalidCall(FIELD, str(error)) from None
    if forbidden := place_refusal(place, reach.hosts, reach.networks):
        raise NotAllowed(f"{FIELD}: {forbidden}")
    return place.host.removesuffix("."), place.port
