"""The documentation's code: every complete block is executed, every command line, name and document in
it is checked.

A ```python block of docs/ is complete: it is executed by itself, in a namespace of its own, without
a database. One that cannot be stands after a line `<!-- no-run -->`, and is compiled only.
tests/docs/test_tutorial.py follows the tutorial.
"""

from __future__ import annotations

import configparser
import json
import pkgutil
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import django
import pytest
import yaml
from celery import Task
from django.apps import apps
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal

import callqueue
from callqueue import conf, events, handlers, metrics, states, tasks
from callqueue.handlers import celery_task, send_email
from callqueue.look import doctor
from callqueue.models import CallAttempt, CallQueue
from callqueue.sending import call_data, intake

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    p for p in DOCS.rglob("*.md") if "_build" not in p.parts and p.parent.name != "tutorial"
)
PROSE = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS / "tutorial").glob("*.md")]
BLOCK = re.compile(
    r"^(?P<mark><!-- no-run -->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"(?:manage\.py +|`)(callqueue_[a-z]+)\b([^`\n#]*)")


def blocks(language: str) -> list[Any]:
    """Every block of a language, named by its page and line."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match["language"] == language:
                line = text.count("\n", 0, match.start("code"))
                place = f"{page.relative_to(DOCS)}:{line}"
                found.append(pytest.param(match["code"], match["mark"] is None, place, id=place))
    return found


@pytest.fixture
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that a block registers are gone afterwards, and so are receivers of signals."""
    monkeypatch.setattr(handlers, "_registered", dict(handlers._registered))
    for signal in (value for value in vars(events).values() if isinstance(value, Signal)):
        monkeypatch.setattr(signal, "receivers", list(signal.receivers))


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize(("code", "is_run", "place"), blocks("python"))
def test_python_is_complete_and_runs(code: str, is_run: bool, place: str, settings: Any) -> None:
    compiled = compile(code, place, "exec")
    if not is_run:
        return
    namespace: dict[str, Any] = {"__name__": "of_the_docs", "INSTALLED_APPS": []}
    exec(compiled, namespace)
    if "CALLQUEUE" in namespace:
        settings.CALLQUEUE = namespace["CALLQUEUE"]
        assert conf.problems() == []


@pytest.mark.parametrize(("code", "is_run", "place"), blocks("json"))
def test_json_is_json(code: str, is_run: bool, place: str) -> None:
    assert json.loads(code)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_has_the_options_that_are_named(page: Path) -> None:
    known, text = get_commands(), page.read_text(encoding="utf-8")
    wrong = [name for name in re.findall(r"manage\.py (callqueue_\w+)", text) if name not in known]
    for name, rest in COMMAND.findall(text):
        if (
            name not in known
        ):  # a table, an index, a metric or a fixture; after "manage.py" it would be a mistake
            continue
        options = options_of(name)
        wrong += [
            f"{name} {option}"
            for option in re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest)
            if option not in options
        ]
    assert wrong == []


def options_of(name: str) -> set[str]:
    parser = load_command_class("callqueue", name).create_parser("manage.py", name)
    return {option for action in parser._actions for option in action.option_strings}


def page(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


def unnamed(names: Any, text: str) -> list[str]:
    return sorted(
        name for name in names if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)
    )


def fields_of_rules() -> list[str]:
    from dataclasses import fields

    from callqueue import Breaker, Concurrency, FixedWindow, Retry, Rule, SlidingWindow, TokenBucket

    kinds = (Rule, Retry, Breaker, SlidingWindow, FixedWindow, TokenBucket, Concurrency)
    return [
        name
        for kind in kinds
        for name in (kind.__name__, *(f.name for f in fields(kind) if f.init))
    ]


def columns() -> list[str]:
    calls = {field.name for field in CallQueue._meta.fields} - {"id"}
    return [*calls, *({field.name for field in CallAttempt._meta.fields} - {"id", "calls"})]


def commands_and_options() -> list[str]:
    commands = [name for name, app in get_commands().items() if app == "callqueue"]
    assert len(commands) >= 12
    usual = BaseCommand().create_parser("manage.py", "x")._actions
    given = {option for action in usual for option in action.option_strings}
    return [*commands, *({option for name in commands for option in options_of(name)} - given)]


def permissions() -> Iterator[str]:
    for model in apps.get_app_config("callqueue").get_models():
        meta = model._meta
        yield from (f"{action}_{meta.model_name}" for action in meta.default_permissions)
        yield from (name for name, _ in meta.permissions)


# by what it is: its names, the page that has all of them, and how it names them if not as a word
NAMED: dict[str, tuple[Any, ...]] = {
    "setting": (lambda: conf.DEFAULTS, "settings.md"),
    "field of rules and limits": (fields_of_rules, "rules.md"),
    "argument of send": (lambda: [*intake.ARGUMENTS, *handlers.HTTP_METHODS, *handlers.BUILT_IN], "sending.md"),
    "parameter of a call": (
        lambda: [*call_data.HTTP_PARAMS, *call_data.ELSEWHERE, *send_email.PARAMS, *celery_task.PARAMS],
        "sending.md",
    ),
    "state": (lambda: CallQueue.Status.names, "states.md"),
    "outcome": (lambda: states.OUTCOMES, "states.md", '"{}"'),
    "column": (columns, "states.md"),
    "command and option": (commands_and_options, "commands.md"),
    "examination of the doctor": (lambda: doctor.ALL, "commands.md", "| `{}` |"),
    "signal": (lambda: [name for name, one in vars(events).items() if isinstance(one, Signal)], "events.md"),
    "permission": (permissions, "permissions.md", "{}"),
    "public name": (lambda: callqueue.__all__, "*.md"),
}  # fmt: skip


@pytest.mark.parametrize("what", NAMED)
def test_everything_is_in_the_reference(what: str) -> None:
    names, where, *form = NAMED[what]
    pages = (DOCS / "reference").glob(where)
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    if form:
        assert [name for name in names() if form[0].format(name) not in text] == []
    else:
        assert unnamed(names(), text) == []


def checks() -> set[str]:
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "callqueue").rglob("*.py"))
    return set(re.findall(r'"(callqueue\.[EW]\d+)"', source))


def metrics_of_the_app() -> set[str]:
    families = metrics.CallQueueCollector().collect()
    return {f.name + ("_total" if f.type == "counter" else "") for f in families}


# by its page: what is there, and how the page names it
ALL_OF: dict[str, tuple[Callable[[], set[str]], str]] = {
    "checks.md": (checks, r"^\| `(callqueue\.[EW]\d+)`"),
    "events.md": (lambda: set(events._EVENTS), r"^\| (`\w+`(?:, `\w+`)*) \| [A-Z]+ \|"),
    "metrics.md": (metrics_of_the_app, r"`(callqueue_[a-z_]+)`"),
    "tasks.md": (
        lambda: {one.name for one in vars(tasks).values() if isinstance(one, Task)},
        r"^\| `(callqueue\.\w+)`",
    ),
}


@pytest.mark.django_db
@pytest.mark.parametrize("where", ALL_OF)
def test_a_page_of_the_reference_has_all_there_are_and_no_other(where: str) -> None:
    names, form = ALL_OF[where]
    text = page(where)
    if where == "events.md":
        text = text.partition("| event |")[2]
    elif where == "tasks.md":
        text = text.partition("\n## ")[0]
    told = " ".join(re.findall(form, text, re.MULTILINE)).replace("`", "").replace(",", "")
    assert set(told.split()) == names()


def test_every_package_and_every_module_at_the_top_is_on_the_map() -> None:
    folder = ROOT / "callqueue"
    names = {path.name for path in folder.glob("*.py")} | {
        f"{path.parent.name}" for path in folder.glob("*/__init__.py")
    }
    text = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    wanted = {name.removesuffix(".py") for name in names} - {"__init__"}
    assert sorted(name for name in wanted if f"`{name}`" not in text) == []


def test_the_drawing_of_packages_is_what_import_linter_checks() -> None:
    text = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    drawn = text.partition("```text\n")[2].partition("```")[0]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    assert drawn.splitlines() == [layer.replace(" : ", "  ") for layer in layers]


# --- names: `callqueue/x/y.py`, `tests/...`, `callqueue.x.y`. A bare `name.py` is a file of the reader's

PATH = re.compile(
    r"(?<![\w./:-])((?:callqueue|tests|docs|example_project|\.ci)/[\w./-]*\w)(?:::(\w+))?"
)
DOTTED = re.compile(r"(?<![\w./-])callqueue(?:\.\w+)+")
READERS_OWN = {"admin", "manage", "settings", "urls", "vendor", "append_line", "test_append_line"}
PERMISSION = re.compile(r"callqueue\.(view|add|change|delete|requeue|edit|cancel|control)_\w+")
CHECK = re.compile(r"callqueue\.[EW]\d+")
WITH_NAMES = [*PROSE, *(ROOT / name for name in ("SECURITY.md", "CHANGELOG.md"))]


@pytest.mark.parametrize("page", WITH_NAMES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_folder_and_test_that_is_named_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [path for path, _ in PATH.findall(text) if not (ROOT / path).exists()]
    wrong += [
        f"{path}::{test}"
        for path, test in PATH.findall(text)
        if test and path not in wrong and f"def {test}(" not in (ROOT / path).read_text("utf-8")
    ]
    # what a span's attributes are called
    others = set(
        re.findall(r'"(callqueue\.[\w.]+)"', (ROOT / "callqueue/telemetry.py").read_text())
    )
    others |= {one.name for one in vars(tasks).values() if isinstance(one, Task)}
    wrong += [
        name
        for name in DOTTED.findall(text)
        if name not in others
        and not (CHECK.fullmatch(name) or PERMISSION.fullmatch(name) or is_there(name))
    ]
    assert wrong == []
    assert sorted(set(re.findall(r"`(\w+)\.py`", text)) - READERS_OWN) == []


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    if name.startswith("callqueue.backends.") and django.VERSION < (6, 0):
        return True  # it needs Django's Tasks API
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


UNITS = sorted((DOCS / "how-to" / "systemd").iterdir())
MANIFESTS = [DOCS / "how-to" / "kubernetes" / name for name in ("migrate.yaml", "shop.yaml")]


def test_manifests_can_be_applied_again_wait_for_migrations_and_name_commands() -> None:
    """A Job's template is immutable, and so is a Deployment's selector: what is applied again has no
    job, and that of the migrations has a name of its own each time, and goes away.
    """
    (job,), applied = (
        list(yaml.safe_load_all(file.read_text(encoding="utf-8"))) for file in MANIFESTS
    )
    assert (job["kind"], "name" in job["metadata"]) == ("Job", False)
    assert job["metadata"]["generateName"].endswith("-")
    assert job["spec"]["ttlSecondsAfterFinished"]
    names = [(document["kind"], document["metadata"]["name"]) for document in applied]
    assert len(set(names)) == len(names) == 4
    assert "Job" not in dict(names)
    named = []
    for document in (job, *applied):
        spec = document["spec"].get("jobTemplate", document)["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        probe = container.get("livenessProbe", {"exec": {"command": []}})
        for command in (container["command"], probe["exec"]["command"]):
            if "manage.py" in command and command[2].startswith("callqueue_"):
                named.append(command[2:])
                assert {one for one in command if one.startswith("--")} <= options_of(command[2])
        if document["kind"] == "Deployment":
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
            assert "migrate --check" in pod["initContainers"][0]["command"][-1]
            assert probe["exec"]["command"]
            assert probe["timeoutSeconds"] < probe["periodSeconds"]
            assert "cpu" not in container["resources"]["limits"]
    assert len(named) == 4
    assert ["callqueue_dispenser", "--alive"] in named


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_says_what_it_runs(unit: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit, encoding="utf-8")
    assert parser["Unit"]["Description"]
    if unit.suffix == ".timer":
        assert parser["Timer"]["OnCalendar"]
        return
    words = parser["Service"]["ExecStart"].split()
    if "manage.py" in words:
        at = words.index("manage.py") + 1
        assert set(words[at + 1 :]) <= options_of(words[at])
    else:
        assert {"worker", "--queues"} <= set(words)
        assert int(parser["Service"]["TimeoutStopSec"]) >= 60


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Paths and the user are another machine's."""
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("User=shop\n", "")
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text.replace("/srv/shop", "/"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [
        line for line in done.stderr.splitlines() if "/shop-" in line or line.startswith("shop-")
    ]
    assert (done.returncode, said) == (0, []), done.stderr


def test_llms_txt_lists_every_page_once_and_no_other() -> None:
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# callqueue\n\n> ")
    listed = re.findall(r"\]\(([^)]+)\): \S", text)
    pages = {
        str(page.relative_to(DOCS))
        for page in DOCS.rglob("*.md")
        if page.name != "index.md" and "_build" not in page.parts
    }
    assert sorted(listed) == sorted(pages)
