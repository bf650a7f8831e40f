"""Why a request has no answer. Every text is safe to show: it repeats no header, body or query."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import NoReturn

import requests

# What is judged in a worker is judged by the settings that it was started with.
HERE = "(in this worker's settings)"


class Dropped(Exception):
    """The gate refuses: nothing was sent."""


class Starved(Dropped):
    """Nothing of this hop was sent, since this process lacks what that takes: no fault of the
    call's, and none of the other side's.
    """


class Failed(Exception):
    """There will be no answer; the text says why, and is safe to show."""

    is_final = False


class Refused(Failed):
    """By policy, or because no request can be made of this: another time will not be better."""

    is_final = True


class Flooded(Failed):
    """The server keeps this process busy with what is no answer; the text says with what."""


# what the system says to a process that may have no more: descriptors, memory of the kernel's
_WANTS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

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


def starved(error: BaseException | None = None) -> Starved | None:
    """What to raise instead of this error where nothing was sent, if it came of what this process
    lacks: descriptors, threads, memory of the kernel's. None where it did not.
    """
    why = _want(error)
    if why is None:
        try:  # what a resolver or a library says without descriptors often names another reason
            for end in socket.socketpair():
                end.close()
        except OSError as refused:
            why = _want(refused)
    text = f"nothing was sent: this worker's process may have no more ({why})"
    return None if why is None else Starved(text)


def _want(error: BaseException | None) -> str | None:
    """What the system refused this process, if that led to this error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _WANTS:
            return str(error.strerror)
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            return "threads"
        error = error.__cause__ or error.__context__
    return None
