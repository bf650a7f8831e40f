"""Fixtures of the attacks."""

from __future__ import annotations

from tests.db.conftest import remote, rules  # noqa: F401
