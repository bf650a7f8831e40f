"""Encryption at rest: texts are sealed under the newest of ENCRYPTION_KEYS and opened by any of
them.

Text and keys enter, a Fernet token leaves, and back. Needs the `encryption` extra, which is
imported on first use. No error contains a key or a text, and without keys nothing here is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from callqueue.exceptions import CallQueueError

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

Keys = Sequence[str | bytes]


class Unreadable(CallQueueError):
    """No key opens this text: it was sealed under a key that is gone, or it was changed."""


class EncryptionUnavailable(CallQueueError):
    """ENCRYPTION_KEYS cannot be used: the extra is not installed, or a key is no Fernet key."""


def seal(data: str, keys: Keys, *, place: str, row: str = "") -> str:
    """`data` as an ASCII token, under the first of `keys`. It opens at this place alone: a column,
    and its row if named.
    """
    return (
        _box(tuple(keys))
        .encrypt(f"{_label(place, row)}{data}".encode("utf-8", "surrogatepass"))
        .decode("ascii")
    )


def open_sealed(token: str, keys: Keys, *, place: str, row: str = "") -> str:
    """What was sealed for this place, by whichever key opens it. Unreadable when none does, or when
    there is none any more.

    What was sealed before tokens had a place opens at any.
    """
    if not keys:
        raise Unreadable("this text is encrypted, and ENCRYPTION_KEYS is empty")
    box = _box(tuple(keys))
    from cryptography.fernet import InvalidToken

    text = None
    with suppress(InvalidToken, ValueError, AttributeError):
        text = box.decrypt(token.encode("ascii")).decode("utf-8", "surrogatepass")
    if text is None:
        raise Unreadable(
            f"none of the {len(keys)} ENCRYPTION_KEYS opens this text; was a key removed too early?"
        )
    if not text.startswith(_BOUND):
        return text
    for label in (_label(place, row), _label(place, "")):
        if text.startswith(label):
            return text[len(label) :]
    raise Unreadable("this text was encrypted for another row or column")


def check_keys(keys: Any) -> list[str]:
    """What is wrong with ENCRYPTION_KEYS, one sentence each; keys are named by their places."""
    if not isinstance(keys, list | tuple):
        return ["must be a list of Fernet keys, newest first"]
    if not keys:
        return []
    try:
        fernet = _fernet_module()
    except EncryptionUnavailable as error:
        return [str(error)]
    problems = [
        f"key {place} of {len(keys)} {why}"
        for place, key in enumerate(keys, 1)
        if (why := _flaw(fernet, key))
    ]
    texts = [key.decode("latin-1") if isinstance(key, bytes) else key for key in keys]
    problems += [
        f"key {place} is given twice"
        for place, key in enumerate(texts, 1)
        if key in texts[: place - 1]
    ]
    return problems


# no text that was sealed before tokens had a place begins with it: databases keep no NUL
_BOUND = "\0"


def _label(place: str, row: str) -> str:
    return f"{_BOUND}{place}{_BOUND}{row}{_BOUND}"


@lru_cache(maxsize=16)
def _box(keys: tuple[str | bytes, ...]) -> MultiFernet:
    fernet = _fernet_module()
    problems = check_keys(keys) or ([] if keys else ["there is no key"])
    if problems:
        raise EncryptionUnavailable(f"ENCRYPTION_KEYS: {'; '.join(problems)}")
    box: MultiFernet = fernet.MultiFernet([fernet.Fernet(key) for key in keys])
    return box


def _fernet_module() -> Any:
    try:
        from cryptography import fernet
    except ImportError:
        raise EncryptionUnavailable(
            "ENCRYPTION_KEYS needs the cryptography package: "
            "pip install 'django-callqueue[encryption]'"
        ) from None
    return fernet


def _flaw(fernet: Any, key: object) -> str:
    if not isinstance(key, str | bytes):
        return f"is not a string but {type(key).__name__}"
    try:
        fernet.Fernet(key)
    except (ValueError, TypeError):
        return "is not a Fernet key; make one with cryptography.fernet.Fernet.generate_key()"
    return ""
