"""A call as a curl command: what a shell makes of it, and what is not in it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.admin.curl import as_curl
from callqueue.security.secrets import Secret
from tests.support.length import examples
from tests.unit.security.test_redaction import json_values, places

PASSWORD = "hunter2-hunter2"
URL = "https://api.example.com/v1"


def words_of(command: str, shell: str = "sh", **environment: str) -> list[str]:
    """The words that a shell makes of the command."""
    script = command.replace("curl", "printf '%s\\0'", 1)
    done = subprocess.run(
        [shell, "-c", script], env=environment, capture_output=True, check=True, timeout=10
    )
    return done.stdout.decode().split("\0")[:-1]


def test_the_whole_request_is_said() -> None:
    params = {
        "url": f"{URL}?a=1",
        "json": {"n": "it's"},
        "headers": {"X-A": "b"},
        "params": {"q": "ü"},
    }
    assert words_of(as_curl("post", params)) == [
        "--globoff", "--request", "POST", "--header", "Content-Type: application/json", "--header", "X-A: b",
        "--data-raw", '{"n": "it\'s"}', "--url", f"{URL}?a=1&q=%C3%BC",
    ]  # fmt: skip
    assert words_of(as_curl("patch", {"url": URL, "data": "@/etc/passwd"}))[3:7] == [
        "--header", "Content-Type:", "--data-raw", "@/etc/passwd",
    ]  # fmt: skip
    assert words_of(as_curl("head", {"url": URL, "headers": {"X-A": "", "@file": "x"}})) == [
        "--globoff", "--head", "--header", "X-A;", "--url", URL,
    ]  # fmt: skip
    for method in ("send_email", "celery_task", "sms", "get; rm -rf /", "", None):
        assert as_curl(method, {"url": URL}) == "", "what is not HTTP"


def test_secrets_are_taken_from_the_environment() -> None:
    command = as_curl("get", {
        "url": URL,
        "headers": {"Authorization": Secret("API-KEY")},
        "auth": ["me", Secret("PW")],
        "params": {"key": Secret("PW")},
        "cookies": {"sid": Secret("PW")},
    })  # fmt: skip
    words = words_of(command, API_KEY="Bearer $(touch x) 'y\"", PW="p w")
    assert "Authorization: Bearer $(touch x) 'y\"" in words
    assert "me:p w" in words
    assert "Cookie: sid=p w" in words
    assert words[-1] == f"{URL}?key=p w"
    command = as_curl("put", {"url": Secret("1HOOK"), "json": {"a": [Secret("B")]}})
    words = words_of(command, _1HOOK=URL, B="beta")
    assert words[-1] == URL
    assert '{"a": ["beta"]}' in words


def test_no_secret_is_shown() -> None:
    command = as_curl("post", {
        "url": f"{URL}?token={PASSWORD}", "headers": {"Authorization": PASSWORD}, "auth": ["u", PASSWORD],
        "cookies": {"a": PASSWORD}, "data": {"password": PASSWORD, "b": ["c", None]},
    })  # fmt: skip
    assert PASSWORD not in command
    assert "password=[redacted]&b=c" in words_of(command)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@settings(max_examples=examples(20, 50), deadline=None)
@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.sampled_from(["", "\3\n", "\x1b[2J", "\t", "\u202e", "'\\\r"]),
)
def test_a_shell_gets_one_word_per_value_and_a_terminal_nothing_to_act_on(
    text: str, control: str
) -> None:
    data = f"{text}{control}{text}"
    command = as_curl("post", {"url": URL, "data": data, "cookies": {"a": data}})
    assert command.isprintable()
    words = words_of(command, shell="bash")
    assert len(words) == 3 + 2 * 4
    assert data in words


@settings(max_examples=examples(60, 200), deadline=None)
@given(json_values | st.dictionaries(places, json_values))
def test_nothing_makes_it_raise(value: Any) -> None:
    assert isinstance(as_curl("post", value), str)
    shlex.split(as_curl("get", value))


def test_a_body_that_is_absurdly_deep_is_one() -> None:
    nested: Any = PASSWORD
    for _ in range(5000):
        nested = [nested]
    assert as_curl("post", {"url": URL, "json": nested})
