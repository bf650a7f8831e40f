"""Encryption at rest: texts are sealed under the newest of ENCRYPTION_KEYS and opened by any of
them. Needs the `encryption` extra, imported on first use. No error contains a key or a text.
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
_WANTED = (
    "must be a list of different Fernet keys, newest first; make one with Fernet.generate_key()"
)


class Unreadable(CallQueueError):
    """No key opens this text here: its key is gone, it was changed, or sealed for another place."""


class EncryptionUnavailable(CallQueueError):
    """ENCRYPTION_KEYS cannot be used: the extra is not installed, or a key is no Fernet key."""


def seal(data: str, keys: Keys, *, place: str, row: str = "") -> str:
    """An ASCII token under the first of `keys`. It opens in this column (and row) alone."""
    text = f"{place}\0{row}\0{data}".encode("utf-8", "surrogatepass")
    return _fernet(tuple(keys)).encrypt(text).decode("ascii")


def open_sealed(token: str, keys: Keys, *, place: str, row: str = "") -> str:
    """The text, by whichever key opens it, for this row or all of the place. Else Unreadable."""
    if not keys:
        raise Unreadable("this text is encrypted, and ENCRYPTION_KEYS is empty")
    box, text = _fernet(tuple(keys)), ""
    from cryptography.fernet import InvalidToken

    with suppress(InvalidToken, ValueError, AttributeError):
        text = box.decrypt(token.encode("ascii")).decode("utf-8", "surrogatepass")
    own_place, _, rest = text.partition("\0")
    own_row, bound, data = rest.partition("\0")
    if not bound or own_place != place or own_row not in ("", row):
        raise Unreadable(
            f"none of the {len(keys)} ENCRYPTION_KEYS opens this text here: was a key removed too"
            " early, or the text moved to another row or column?"
        )
    return data


def key_problems(keys: Any) -> list[str]:
    """What is wrong with ENCRYPTION_KEYS, in a sentence without a key; empty where all is well."""
    if not isinstance(keys, list | tuple) or not all(isinstance(k, str | bytes) for k in keys):
        return [_WANTED]
    try:
        if keys:
            _fernet(tuple(keys))
    except EncryptionUnavailable as error:
        return [str(error).removeprefix("ENCRYPTION_KEYS ")]
    distinct = {key.decode("latin-1") if isinstance(key, bytes) else key for key in keys}
    return [] if len(distinct) == len(keys) else [_WANTED]


@lru_cache(maxsize=16)
def _fernet(keys: tuple[str | bytes, ...]) -> MultiFernet:
    try:
        from cryptography.fernet import Fernet, MultiFernet
    except ImportError:
        raise EncryptionUnavailable(
            "ENCRYPTION_KEYS needs the cryptography package:"
            " pip install 'django-callqueue[encryption]'"
        ) from None
    with suppress(ValueError, TypeError):
        return MultiFernet([Fernet(key) for key in keys])
    raise EncryptionUnavailable(f"ENCRYPTION_KEYS {_WANTED}")
