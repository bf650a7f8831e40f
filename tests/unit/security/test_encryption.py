"""Texts are sealed under the newest key and opened by any; errors never show a key."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
from cryptography.fernet import Fernet
from hypothesis import given
from hypothesis import strategies as st

from callqueue.exceptions import CallQueueError
from callqueue.security import encryption
from callqueue.security.encryption import EncryptionUnavailable, Unreadable, key_problems

seal, open_sealed = (
    partial(encryption.seal, place="t.column"),
    partial(encryption.open_sealed, place="t.column"),
)
OLD, NEW, OTHER = (Fernet.generate_key().decode() for _ in range(3))


@given(st.text(st.characters(exclude_categories=())))
def test_what_was_sealed_opens_under_any_key_and_shows_nothing(text: str) -> None:
    """The newest seals."""
    tokens = {seal(text, [NEW]) for _ in range(3)}
    assert len(tokens) == 3
    assert all(token.isascii() and (len(text) < 5 or text not in token) for token in tokens)
    assert {open_sealed(token, [NEW]) for token in tokens} == {text}
    assert open_sealed(seal(text, [OLD]), [NEW, OLD]) == text
    assert open_sealed(seal(text, [NEW, OLD]), [NEW]) == text


@pytest.mark.parametrize(
    "token",
    ["", "x", "gAAAAA", "é", None, 5, seal("text", [OTHER]), seal("text", [NEW])[:-4] + "AAAA"],
)
def test_what_no_key_opens_is_unreadable(token: Any) -> None:
    with pytest.raises(Unreadable, match="none of the 2 ENCRYPTION_KEYS") as caught:
        open_sealed(token, [NEW, OLD])
    assert isinstance(caught.value, CallQueueError)
    assert NEW not in str(caught.value)


def test_what_was_sealed_opens_in_its_own_column_and_row_alone() -> None:
    """What was sealed without a row, in any of its column."""
    opens = partial(encryption.open_sealed, keys=[NEW])
    token = encryption.seal("text", (NEW.encode(),), place="t.a", row="7")
    assert opens(token, place="t.a", row="7") == "text"
    for place, row in (("t.a", "8"), ("t.a", ""), ("t.b", "7"), ("u.a", "7")):
        with pytest.raises(Unreadable, match="moved to another row or column"):
            opens(token, place=place, row=row)
    with pytest.raises(Unreadable, match="ENCRYPTION_KEYS is empty"):
        encryption.open_sealed(token, [], place="t.a", row="7")
    of_column = seal("text", [NEW])
    assert opens(of_column, place="t.column", row="7") == "text"
    with pytest.raises(Unreadable):
        opens(of_column, place="t.b", row="7")


def test_unusable_keys_are_refused_and_found_without_being_shown() -> None:
    for keys in ([], ["short"], [NEW, "hunter2"], [5]):
        with pytest.raises(EncryptionUnavailable, match="^ENCRYPTION_KEYS must be") as caught:
            seal("text", keys)
        assert "hunter2" not in str(caught.value) and NEW not in str(caught.value)
    wrong: list[Any] = [NEW, None, [NEW, "x"], [None], [[NEW]], ["é"], [NEW, NEW.encode()]]
    for keys in wrong:
        (problem,) = key_problems(keys)
        assert problem.startswith("must be a list of different Fernet keys, newest first")
        assert NEW not in problem
    for keys in ([], [NEW], (NEW, OLD), [NEW.encode()]):
        assert key_problems(keys) == []


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    encryption._fernet.cache_clear()
    assert "django-callqueue[encryption]" in key_problems([NEW])[0]
    with pytest.raises(EncryptionUnavailable, match=r"django-callqueue\[encryption\]"):
        seal("text", [NEW])
    with pytest.raises(EncryptionUnavailable, match=r"django-callqueue\[encryption\]"):
        open_sealed("token", [NEW])
