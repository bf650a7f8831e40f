"""Fixtures of the tests of the admin. What needs models is imported inside: this file is read before
Django is set up.
"""

from __future__ import annotations

import pytest
from django.test import Client


@pytest.fixture
def root(db: None) -> Client:
    from tests.db.admin.staff import log_in

    return log_in(is_superuser=True)
