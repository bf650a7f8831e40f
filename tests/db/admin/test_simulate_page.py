"""What draining so many calls would take, as a page."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.urls import reverse

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from tests.db.admin.staff import log_in, text_of

Rules = Callable[..., None]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("rule=pay&calls=250&latency=0.2&keys=1", "2 hours"),
        ("rule=pay&calls=50&latency=0.2&keys=1", "none"),
        ("rule=pay", "Work it out"),
        ("rule=pay&calls=0&latency=0.2&keys=1", "greater than or equal to 1"),
        ("rule=nope&calls=5&latency=0.2&keys=1", "not one of the available choices"),
        ("rule=pay&calls=x&latency=nan&keys=", "errorlist"),
        ("rule=pay&calls=100000&latency=0.2&keys=1", "less than or equal to 20000"),
        ("rule=many&calls=5001&latency=0.2&keys=1", "At most 5000 are followed here"),
        ("rule=many&calls=5000&latency=0.2&keys=20000", "Take"),
    ],
)
def test_what_if(rules: Rules, asked: str, said: str) -> None:
    four = [
        FixedWindow("1/s"),
        SlidingWindow("5/m", per="key"),
        TokenBucket("3/s", burst=2, per="key"),
        Concurrency(2),
    ]
    rules(pay=Rule(limits=[SlidingWindow("100/h")]), many=Rule(limits=four))
    response = log_in("view_callqueue").get(f"{reverse('admin:callqueue_simulate')}?{asked}")
    assert response.status_code == 200
    assert said in text_of(response)
    assert log_in().get(reverse("admin:callqueue_simulate")).status_code == 403
