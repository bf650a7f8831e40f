"""`make demo` as a user runs it: it ends by itself, says so truly, and leaves nothing."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import requests

from example_project.demo import verdict
from example_project.demo.calls import COUNTS
from example_project.demo.stage import StageError, require_free_port
from tests.celery_app import app

# Importing the example project made its Celery application the current one.
app.set_current()
app.set_default()

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "CALLQUEUE_DEMO_TEST"


class Demo:
    """The demo in a process of its own, and what it has left."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = secrets.token_hex(8)
        self.folder, self.chart = folder, folder / "out" / "calls.svg"
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(folder)}
        module = ["-m", "example_project.demo", "--chart", str(self.chart)]
        self.process = subprocess.Popen(
            [sys.executable, *module, *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def wait_for(self, text: str) -> str:
        """The line that holds the text, once it is said."""
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if text in line:
                return line
        raise AssertionError(f"never said {text!r}:\n{''.join(said)}")

    def end(self, timeout: float = 200.0) -> str:
        return self.process.communicate(timeout=timeout)[0]

    def processes(self) -> list[int]:
        """Those that live and carry this demo's mark in their environment."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in environ.read_bytes():
                    found.append(int(environ.parent.name))
            except OSError:
                continue
        return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since pytest's own folders are too long for some sockets."""
    with tempfile.TemporaryDirectory(prefix="cq-demo-") as name:
        yield Path(name)


@pytest.mark.slow
def test_the_demo_keeps_its_promises_and_leaves_only_the_picture(folder: Path) -> None:
    others = ["git", "ls-files", "--others", "--exclude-standard", "example_project", "demo-out"]
    before = subprocess.run(others, cwd=ROOT, capture_output=True, check=False).stdout
    demo = Demo(folder)
    said = demo.end()
    assert demo.process.returncode == 0, said
    assert "As promised" in said
    assert re.search(
        rf"^\s*all\s+{sum(COUNTS.values())}\s+291\s+9\s+318\s+0\s+0\s*$", said, re.MULTILINE
    ), said
    assert f"Picture: {demo.chart}" in said
    assert ElementTree.parse(demo.chart).getroot().tag.endswith("svg")
    assert demo.processes() == []
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert subprocess.run(others, cwd=ROOT, capture_output=True, check=False).stdout == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGTERM, id="sigterm", marks=pytest.mark.fault),
    ],
)
def test_an_interrupted_demo_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    demo = Demo(folder)
    demo.wait_for("calls are in the queue")
    assert len(demo.processes()) >= 5
    demo.process.send_signal(number)
    said = demo.end(timeout=30)
    assert demo.process.returncode == 130
    assert "Interrupted" in said
    assert demo.processes() == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.fault
def test_with_keep_the_admin_lets_in_whoever_has_the_login_that_was_printed(folder: Path) -> None:
    if not port_is_free():
        pytest.skip("port 8000 is in use")
    demo = Demo(folder, "--keep")
    said = demo.wait_for("Admin: ")
    url, user, password = re.search(r"Admin: (\S+)\s+user (\S+)\s+password (\S+)", said).groups()  # type: ignore[union-attr]
    with requests.Session() as browser:
        browser.trust_env = False
        page = browser.get(url, timeout=20)
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)[1]  # type: ignore[index]
        form = {
            "csrfmiddlewaretoken": token,
            "username": user,
            "password": password,
            "next": "/admin/",
        }
        assert "Log out" in browser.post(page.url, data=form, timeout=20).text
        assert browser.get(url.replace("/admin/", "/static/admin/css/base.css"), timeout=20).ok
    demo.process.send_signal(signal.SIGINT)
    demo.end(timeout=30)
    assert demo.process.returncode == 130
    assert demo.processes() == []
    assert port_is_free()


def port_is_free() -> bool:
    try:
        require_free_port()
    except StageError:
        return False
    return True


def test_the_demo_says_that_the_admin_s_port_is_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        except OSError:
            pass  # somebody else has it, which does as well
        demo = Demo(folder, "--keep")
        said = demo.end(timeout=30)
    assert demo.process.returncode == 1
    assert "port 8000 on 127.0.0.1 is in use" in said
    assert list(folder.iterdir()) == []


def test_a_broken_promise_is_named() -> None:
    figures = verdict.Figures("prices", "5 a second", 6, 5, calls=109, refused=1, made_twice=2)
    told = " | ".join(verdict._broken_promises(figures))
    assert "6 in a window that allows 5" in told
    assert "429 to 1 calls" in told
    assert "2 calls succeeded more than once" in told
    assert "110 calls were sent, and 109 are there" in told
    call = verdict.Call("prices", "plain-prices-001", "failed", 1)
    assert verdict._surprises(call, 2) == [
        "plain-prices-001 is failed, not done",
        "plain-prices-001: 1 attempts are recorded, and 2 requests arrived",
    ]
    assert verdict.highest_use([0.0, 0.9, 1.1, 1.8], 1.0) == 3
    assert verdict.highest_use([0.0, 1.0, 2.0], 1.0) == 1
