"""What the database tells of a vacuum."""

from __future__ import annotations

import pytest

from callqueue import database


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("full", [False, True])
def test_no_vacuum_shows_no_progress(full: bool) -> None:
    assert database.vacuum_progress("default", ["callqueue_callqueue"], full=full) is None
