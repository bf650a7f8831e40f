"""The documentation's code: every complete block is executed, every command line and document in it
is checked.

A ```python block of docs/ is complete: it is executed by itself, in a namespace of its own, without
a database. One that cannot be stands after a line `<!-- no-run -->`, and is compiled only.
tests/docs/test_tutorial.py follows the tutorial.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class

from callqueue import conf, handlers
from callqueue.look import doctor

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
    from django.dispatch import Signal

    from callqueue import events

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


def test_every_setting_is_in_the_reference() -> None:
    assert unnamed(conf.DEFAULTS, page("settings.md")) == []


def test_every_field_of_rules_and_limits_is_in_the_reference() -> None:
    from dataclasses import fields

    from callqueue import Breaker, Concurrency, FixedWindow, Retry, Rule, SlidingWindow, TokenBucket

    kinds = (Rule, Retry, Breaker, SlidingWindow, FixedWindow, TokenBucket, Concurrency)
    names = {f.name for kind in kinds for f in fields(kind) if f.init} | {
        kind.__name__ for kind in kinds
    }
    assert unnamed(names, page("rules.md")) == []


def test_every_argument_of_send_is_in_the_reference() -> None:
    from callqueue.handlers import BUILT_IN, HTTP_METHODS
    from callqueue.sending import intake

    assert unnamed([*intake.ARGUMENTS, *HTTP_METHODS, *BUILT_IN], page("sending.md")) == []


def test_every_parameter_of_a_call_is_in_the_reference() -> None:
    from callqueue.handlers import celery_task, send_email
    from callqueue.sending import call_data

    names = [*call_data.HTTP_PARAMS, *call_data.ELSEWHERE]
    names += [*send_email.PARAMS, *celery_task.PARAMS]
    assert unnamed(names, page("sending.md")) == []


def test_every_state_and_outcome_is_in_the_reference() -> None:
    from callqueue import states
    from callqueue.models import CallQueue

    assert unnamed(CallQueue.Status.names, page("states.md")) == []
    assert [outcome for outcome in states.OUTCOMES if f'"{outcome}"' not in page("states.md")] == []


def test_every_column_is_in_the_reference() -> None:
    from callqueue.models import CallAttempt, CallQueue

    assert (
        unnamed((f.name for f in CallQueue._meta.fields if f.name != "id"), page("states.md")) == []
    )
    columns = {f.name for f in CallAttempt._meta.fields} - {"id", "calls"}
    assert unnamed(columns, page("states.md")) == []


def test_every_command_and_option_is_in_the_reference() -> None:
    from django.core.management.base import BaseCommand

    commands = [name for name, app in get_commands().items() if app == "callqueue"]
    usual = {
        o for a in BaseCommand().create_parser("manage.py", "x")._actions for o in a.option_strings
    }
    options = {option for name in commands for option in options_of(name) - usual}
    assert len(commands) >= 12
    assert unnamed([*commands, *options], page("commands.md")) == []


def test_every_check_is_in_the_reference_and_no_other() -> None:
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "callqueue").rglob("*.py"))
    there = set(re.findall(r'"(callqueue\.[EW]\d+)"', source))
    assert set(re.findall(r"^\| `(callqueue\.[EW]\d+)`", page("checks.md"), re.MULTILINE)) == there


def test_every_event_is_in_the_reference_and_no_other() -> None:
    from callqueue import events

    table = page("events.md").partition("| event |")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [A-Z]+ \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == set(events._EVENTS)


def test_every_signal_is_in_the_reference() -> None:
    from django.dispatch import Signal

    from callqueue import events

    assert (
        unnamed(
            (name for name, value in vars(events).items() if isinstance(value, Signal)),
            page("events.md"),
        )
        == []
    )


@pytest.mark.django_db
def test_every_metric_is_in_the_reference_and_no_other() -> None:
    from callqueue import metrics

    families = metrics.CallQueueCollector().collect()
    there = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    assert set(re.findall(r"`(callqueue_[a-z_]+)`", page("metrics.md"))) == there


def test_every_public_name_is_in_the_reference() -> None:
    import callqueue

    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    assert unnamed(callqueue.__all__, text) == []


def test_every_task_is_in_the_reference_and_no_other() -> None:
    from celery import Task

    from callqueue import tasks

    names = {one.name for one in vars(tasks).values() if isinstance(one, Task)}
    table = page("tasks.md").partition("\n## ")[0]
    assert set(re.findall(r"^\| `(callqueue\.\w+)`", table, re.MULTILINE)) == names


def test_every_permission_is_in_the_reference() -> None:
    from django.apps import apps

    wanted = set()
    for model in apps.get_app_config("callqueue").get_models():
        meta = model._meta
        wanted |= {f"{action}_{meta.model_name}" for action in meta.default_permissions} | {
            name for name, _ in meta.permissions
        }
    text = page("permissions.md")
    assert sorted(name for name in wanted if name not in text) == []


def test_every_examination_of_the_doctor_is_in_the_reference() -> None:
    text = page("commands.md")
    assert sorted(name for name in doctor.ALL if f"| `{name}` |" not in text) == []


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
