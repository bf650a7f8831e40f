"""What a Celery task may be given."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue.security.secrets import Secret
from tests.support.samples import checked, refused, task


class TestACeleryTask:
    def test_has_a_name_and_arguments(self) -> None:
        checked(task(args=[1, {"a": 2}], kwargs={"b": 3}))
        checked(task(args=(1,), kwargs=None))

    @pytest.mark.parametrize(
        ("params", "field"),
        [
            ({"name": ""}, "params.name"),
            ({"name": None}, "params.name"),
            ({"name": "a b"}, "params.name"),
            ({"args": {}}, "params.args"),
            ({"args": "ab"}, "params.args"),
            ({"kwargs": [1]}, "params.kwargs"),
            ({"kwargs": Secret("STRIPE")}, "params.kwargs"),
            ({"countdown": 5}, "params.countdown"),
            ({"headers": ["id"]}, "params.headers"),
            ({"headers": {"id": 7}}, "params.headers.id"),
            ({"embed": "chain"}, "params.embed"),
        ],
    )
    def test_is_refused_with_the_field(self, params: dict[str, Any], field: str) -> None:
        refused(task(**params), field)
