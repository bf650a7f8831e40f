"""The embedded PostgreSQL: there when it has to be, and gone afterwards."""

from __future__ import annotations

import os

import psycopg2
import pytest

from tests.support import servers


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL is expected where nothing listens."""
    monkeypatch.delenv(servers.EMBEDDED, raising=False)
    monkeypatch.setenv(
        "CALLQUEUE_TEST_PG_URL", f"postgresql://postgres@127.0.0.1:{servers.free_port()}"
    )


@pytest.mark.usefixtures("no_server")
def test_a_server_is_brought_where_none_answers_and_taken_away_again() -> None:
    before = os.environ["CALLQUEUE_TEST_PG_URL"]
    with servers.postgresql() as kind:
        url = servers.postgresql_url()
        connection = psycopg2.connect(
            host=url.host, port=url.port, user=url.user, dbname="postgres"
        )
        connection.close()
        with servers.postgresql() as inside:
            assert (kind, inside, servers.postgresql_url()) == ("embedded", "embedded", url)
    assert os.environ["CALLQUEUE_TEST_PG_URL"] == before
    assert servers.EMBEDDED not in os.environ
    with pytest.raises(psycopg2.OperationalError):
        psycopg2.connect(host=url.host, port=url.port, user=url.user, dbname="postgres")


@pytest.mark.usefixtures("no_server")
def test_a_server_that_is_away_says_so() -> None:
    assert servers.refusal("postgresql").startswith("nothing answers at 127.0.0.1:")


def test_a_server_that_lets_nobody_in_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: servers.ServerUrl) -> None:
        raise PermissionError

    monkeypatch.setitem(servers.LOG_IN, "redis", refuse)
    with servers.socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv(
            "CALLQUEUE_TEST_REDIS_URL", f"redis://127.0.0.1:{listening.getsockname()[1]}"
        )
        assert "refuses us (PermissionError); set CALLQUEUE_TEST_REDIS_URL" in servers.refusal(
            "redis"
        )
