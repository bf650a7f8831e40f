"""The tests' own ground: a database that works, and a Celery application that the shared tasks
find.
"""

from __future__ import annotations

import pytest
from celery import current_app
from django.db import connection


@pytest.mark.django_db
def test_the_database_answers() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)


def test_the_chosen_database_is_the_one_in_use(request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("database")
    assert connection.vendor == {"mariadb": "mysql"}.get(chosen, chosen)


def test_shared_tasks_find_the_application_of_the_tests() -> None:
    assert current_app.main == "tests"
    assert "tests.echo" in current_app.tasks
