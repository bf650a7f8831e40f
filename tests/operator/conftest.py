"""Fixtures of the questions that an operator asks. What needs models is imported inside: this file is
read before Django is set up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.db.conftest import remote as remote
from tests.db.conftest import rules as rules

if TYPE_CHECKING:
    from tests.operator.asking import Ask


@pytest.fixture
def ask(db: None) -> Ask:
    """Somebody who asks."""
    from tests.operator.asking import Ask

    return Ask()
