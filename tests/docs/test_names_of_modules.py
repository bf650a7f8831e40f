"""Every module, folder and test that a page names is there: `callqueue/x/y.py`, `tests/...`,
`callqueue.x.y`.

A bare `name.py` is a file of the reader's own project.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec

import django
import pytest
from celery import Task

from callqueue import tasks
from tests.docs.test_docs_code import DOCS, PROSE, ROOT

PAGES = [*PROSE, *(ROOT / name for name in ("SECURITY.md", "CHANGELOG.md"))]
PATH = re.compile(
    r"(?<![\w./:-])((?:callqueue|tests|docs|example_project|\.ci)/[\w./-]*\w)(?:::(\w+))?"
)
DOTTED = re.compile(r"(?<![\w./-])callqueue(?:\.\w+)+")
BARE = re.compile(r"`(\w+\.py)`")
READERS_OWN = {
    "admin.py",
    "manage.py",
    "settings.py",
    "urls.py",
    "vendor.py",
    "append_line.py",
    "test_append_line.py",
}
PERMISSION = re.compile(r"callqueue\.(view|add|change|delete|requeue|edit|cancel|control)_\w+")
CHECK = re.compile(r"callqueue\.[EW]\d+")


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def text(request: pytest.FixtureRequest) -> str:
    return str(request.param.read_text(encoding="utf-8"))


def test_every_path_that_is_named_is_there(text: str) -> None:
    wrong = [path for path, _ in PATH.findall(text) if not (ROOT / path).exists()]
    wrong += [
        f"{path}::{test}"
        for path, test in PATH.findall(text)
        if test and path not in wrong and f"def {test}(" not in (ROOT / path).read_text("utf-8")
    ]
    assert wrong == []


def test_every_dotted_name_is_there(text: str) -> None:
    others = names_of_tasks() | names_of_spans()
    wrong = [
        name
        for name in DOTTED.findall(text)
        if not (
            CHECK.fullmatch(name) or PERMISSION.fullmatch(name) or name in others or is_there(name)
        )
    ]
    assert wrong == []


def test_a_file_of_the_package_is_named_with_its_folder(text: str) -> None:
    assert sorted(set(BARE.findall(text)) - READERS_OWN) == []


def test_the_check_notices_what_is_not_there() -> None:
    assert not is_there("callqueue.nowhere") and not is_there("callqueue.models.Nothing")
    assert is_there("callqueue.models.CallQueue") and is_there("callqueue.control")
    assert PATH.findall("see `tests/db/x.py::test_it`.") == [("tests/db/x.py", "test_it")]
    assert (DOCS / "index.md").exists()


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    if name.startswith("callqueue.backends.") and django.VERSION < (6, 0):
        return True  # it needs Django's Tasks API
    module, rest = name, list[str]()
    while find(module) is None:
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    found: object = import_module(module)
    for attribute in rest:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


def find(module: str) -> object:
    try:
        return find_spec(module)
    except ModuleNotFoundError:  # a part of the name is no package
        return None


def names_of_tasks() -> set[str]:
    return {one.name for one in vars(tasks).values() if isinstance(one, Task)}


def names_of_spans() -> set[str]:
    """What `callqueue/telemetry.py` calls the attributes of a span."""
    source = (ROOT / "callqueue" / "telemetry.py").read_text(encoding="utf-8")
    return set(re.findall(r'"(callqueue\.[\w.]+)"', source))
