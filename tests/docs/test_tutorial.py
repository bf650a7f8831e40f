"""The tutorial, followed to the letter in a new project: its files are written, its shell session
is executed.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.brokers import broker
from tests.support.servers import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
TUTORIAL = ROOT / "docs" / "tutorial" / "first-calls.md"
README = ROOT / "README.md"
PORT_OF_THE_PAGE = "9000"


def python_blocks(page: Path) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


class Project:
    """A project made by following the page, with a port of its own for the vendor."""

    def __init__(self, folder: Path, name: str = "myshop") -> None:
        self.folder, self.port = folder, str(free_port())
        ours = ("DJANGO_", "CALLQUEUE_")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.session = ""
        if name:
            self.run("-m", "django", "startproject", name, ".")

    def follow(self, blocks: list[str]) -> None:
        """Write the blocks that are files, appending to those that are there; keep the rest for the
        shell.
        """
        for block in blocks:
            block = block.replace(PORT_OF_THE_PAGE, self.port)
            first, _, rest = block.partition("\n")
            if first.startswith("# file: "):
                with (self.folder / first.removeprefix("# file: ")).open(
                    "a", encoding="utf-8"
                ) as file:
                    file.write(rest)
            else:
                self.session += block

    def obey(self, line: str, stack: ExitStack) -> None:
        """Type a line of a page. What goes on runs until `stack` ends; what asks is asked until it
        finds what the page says.
        """
        program, *rest = shlex.split(line.replace(PORT_OF_THE_PAGE, self.port))
        as_module = {"django-admin": ["-m", "django"], "celery": ["-m", "celery"], "python": []}
        if "venv" in rest or program == "pip":
            return
        if program == "mkdir":
            (self.folder / rest[0]).mkdir()
            return
        arguments = [*as_module[program], *rest]
        if not {"worker", "callqueue_run", "callqueue_dispenser", "http.server"} & set(rest):
            has_celery = (self.folder / "mysite" / "celery.py").exists()
            workers = "1 worker listens" if has_celery else "workers: none is needed"
            finds = {"callqueue_status": "done", "callqueue_doctor": workers}
            wanted = next((text for name, text in finds.items() if name in rest), "")
            deadline = time.monotonic() + 60
            while wanted not in self.run(*arguments, may_fail=bool(wanted)):
                assert time.monotonic() < deadline, f"{line}: not {wanted}"
            return
        self.start(arguments, stack, listens="http.server" in rest)

    def start(self, arguments: list[str], stack: ExitStack, *, listens: bool) -> None:
        """A process that runs until `stack` ends. No event tells of a port that it listens to."""
        command = [sys.executable, *arguments]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment, **streams)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        deadline = time.monotonic() + 20
        while listens:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the page's vendor does not answer"
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(self.port)), 1):
                return
            time.sleep(0.02)

    def run(self, *arguments: str, text: str = "", may_fail: bool = False) -> str:
        """What it says. What `may_fail` is asked again, and says nothing until it succeeds."""
        command = [sys.executable, *arguments]
        streams = {"input": text, "capture_output": True, "text": True}
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, timeout=120, check=False, **streams
        )
        if done.returncode and may_fail:
            return ""
        assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def test_the_tutorial_s_code_does_what_the_page_says(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.follow(python_blocks(TUTORIAL))
    (project.folder / "session.py").write_text(project.session, encoding="utf-8")
    session = "exec(compile(open('session.py').read(), 'session.py', 'exec'), globals())"
    with ExitStack() as stack:
        project.start(["vendor.py"], stack, listens=True)
        project.run("manage.py", "migrate", "--verbosity", "0")
        project.run("manage.py", "shell", "--command", session)


@pytest.mark.server("redis")
def test_the_readme_s_start_ends_with_a_call_that_is_done(tmp_path: Path) -> None:
    """Every command and every block of the section, in order, but for the environment that is here
    already, with a port and a Redis database of its own.
    """
    text = README.read_text(encoding="utf-8")
    start = text[text.index("\n## Start\n") : text.index("\n## Send a call\n")]
    with broker("redis") as own, ExitStack() as stack:
        project = Project(tmp_path, name="")
        for language, block in re.findall(
            r"^```(\w+)\n(.*?)^```$", start, re.MULTILINE | re.DOTALL
        ):
            block = block.replace("redis://localhost:6379/0", own.url)
            if language == "python" and not block.startswith("DATABASES"):
                project.follow([block])
                if not block.startswith("# file: "):
                    project.run("manage.py", "shell", "--command", project.session)
            for line in re.findall(r"^\$ (.*?)(?: +#.*)?$", block, re.MULTILINE):
                project.obey(line, stack)


def test_a_project_without_its_celery_application_is_warned(tmp_path: Path) -> None:
    project = Project(tmp_path)
    with (project.folder / "myshop" / "settings.py").open("a", encoding="utf-8") as file:
        file.write('INSTALLED_APPS += ["callqueue"]\nCELERY_BROKER_URL = "amqp://mq:5672//"\n')
    done = subprocess.run(
        [sys.executable, "manage.py", "check"],
        cwd=project.folder,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "callqueue.W003" in done.stderr
    assert "from .celery import app" in done.stderr


@pytest.mark.parametrize("page", [README, TUTORIAL], ids=["readme", "tutorial"])
def test_every_link_leads_somewhere_and_all_code_is_python(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []
    assert python_blocks(page)
    for block in python_blocks(page):
        compile(block, str(page), "exec")
