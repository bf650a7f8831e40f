"""Why a request has no answer. Every text is safe to show: it repeats no header, body or query."""

from __future__ import annotations

import ssl
from typing import NoReturn

import requests


class Dropped(Exception):
    """The gate refuses: nothing of this hop was sent."""


class Failed(Exception):
    """There will be no answer; the text says why, and is safe to show."""

    is_final = False


class Refused(Failed):
    """By policy, or because no request can be made of this: another time will not be better."""

    is_final = True


class Flooded(Failed):
    """The server keeps this process busy with what is no answer; the text says with what."""


_TELLING: dict[type[Exception], str] = {
    requests.exceptions.MissingSchema: "its URL has no scheme",
    requests.exceptions.InvalidURL: "its URL is not valid",
    requests.exceptions.InvalidHeader: "one of its headers is not valid",
    requests.exceptions.InvalidJSONError: "its JSON holds something that JSON has no form for",
}


def refuse_to_compose(error: Exception) -> NoReturn:
    """Raise Refused with a reason of our own: the error's text may repeat a secret."""
    why = _TELLING.get(type(error), type(error).__name__)
    raise Refused(f"the request cannot be made: {why}") from None


def reason_of(error: Exception) -> str:
    """A network error in a few words, without the objects that urllib3 puts into its texts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted, {error.verify_message}"
    return str(
        getattr(error, "strerror", None)
        or getattr(error, "reason", None)
        or error
        or type(error).__name__
    )
