"""The wheel holds what the app needs and nothing else, says what it is, and its types hold outside
of this project.

`make wheel` alone runs this: it builds the wheel, and names its folder (CALLQUEUE_TEST_WHEEL).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USER = '''\
"""An application that uses callqueue, typed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import callqueue
from callqueue import (
    Breaker, Concurrency, Discard, FixedWindow, Forecast, GiveUp, HoldUntil, Retry, RetryLater, Route, Rule, SlidingWindow,
    Succeeded, TokenBucket,
)
from callqueue.exceptions import CallQueueError, IllegalTransition
from callqueue.models import CallAttempt, CallQueue

account = SlidingWindow("100/s", name="account")
RULES: dict[str, Rule] = {
    "read": Rule(hosts=["api.example.com"], queues="api", limits=[account], retry=Retry(max_attempts=5, base=0.5)),
    "pay": Rule(priority=10, limits=[account, SlidingWindow("5/s", per="key")], breaker=Breaker(failures=3)),
    "voice": Rule(queues=["e1", "e2"], limits=[TokenBucket("10/s", burst=10, per="queue")]),
    "maps": Rule(limits=[FixedWindow("25000/d", timezone="America/Los_Angeles"), Concurrency(8)]),
}


def route(call_data: Mapping[str, Any]) -> Route | Discard | str | None:
    if call_data["method"] == "delete":
        return Discard("we delete nothing")
    return Route(rule="pay", key="K", priority=1, cost=2)


def classify(response: Any) -> Succeeded | RetryLater | HoldUntil | GiveUp | None:
    if response.status_code == 403:
        return HoldUntil(30.0, "slow down")
    return RetryLater("busy", after=2.0) if response.status_code == 529 else None


def send(due: datetime) -> int | None:
    call = CallQueue.objects.send(
        {"method": "post", "params": {"url": "https://api.example.com/"}},
        rule="pay", key={"workspace": "T1"}, cost={"tokens": 15}, not_before=due, expires_at=due + timedelta(hours=1),
        unique_key="order-1", callback="shop.tasks.done",
    )
    if call is None:
        return None
    forecast: Forecast = call.forecast()
    position: int | None = forecast.position
    attempts: list[CallAttempt] = list(call.attempts.all())
    try:
        call.requeue(again=True)
        call.cancel()
    except IllegalTransition as error:
        wrong: CallQueueError = error
        print(wrong, position, attempts)
    return call.pk


def bulk() -> int:
    made: list[CallQueue] = CallQueue.objects.send_many([{"method": "get"}], batch_size=10, rule="read")
    has_room: bool = CallQueue.objects.under_threshold("read")
    cancelled: int = CallQueue.objects.filter(rule="read").cancel()
    requeued: int = CallQueue.objects.failed().requeue()
    return len(made) + cancelled + requeued + has_room


async def later() -> CallQueue | None:
    return await CallQueue.objects.asend({"method": "get"}, rule="read")


def look_back() -> list[str]:
    last: CallAttempt | None = CallAttempt.objects.filter(rule="read").order_by("-id").first()
    unfinished: list[CallQueue] = [*CallQueue.objects.using("default").waiting(), *CallQueue.objects.dispatched()]
    return [str(call) for call in unfinished if call.status != CallQueue.Status.DONE and last is not None]


beat: Mapping[str, Any] = callqueue.beat_schedule()
'''
WRONG = """
Rule(limits=[SlidingWindow(5)])
Rule(queue="api")
CallQueue.objects.send({"method": "get"}, rul="read")
"""


@pytest.fixture(scope="module")
def wheel() -> Iterator[zipfile.ZipFile]:
    built = (ROOT / os.environ.get("CALLQUEUE_TEST_WHEEL", "dist")).glob("*.whl")
    with zipfile.ZipFile(max(built, key=lambda path: path.stat().st_mtime)) as opened:
        yield opened


PLUGIN = """\
plugins = mypy_django_plugin.main
[mypy.plugins.django-stubs]
django_settings_module = shop_settings
strict_settings = False
"""
SETUPS = {
    "django-stubs and its plugin": PLUGIN,
    "django-stubs without the plugin": "",
    "no stubs": "ignore_missing_imports = True\nno_site_packages = True\n",
}


def test_it_holds_what_the_app_needs_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = "".join(
        (ROOT / "callqueue" / name).read_text(encoding="utf-8")
        for name in ("checks.py", "look/doctor.py")
    )
    pages = re.findall(r"page\('([^']+)'\)", sources)  # which hints name
    assert len(pages) >= 4
    deployed = (
        "monitoring/grafana-dashboard.json",
        "systemd/shop-worker.service",
        "kubernetes/shop.yaml",
    )
    wanted = [f"callqueue/docs/{page}" for page in pages]
    wanted += [f"callqueue/docs/how-to/{name}" for name in deployed]
    wanted += [name.removesuffix(".po") + ".mo" for name in names if name.endswith(".po")]
    assert [name for name in wanted if name not in names] == []
    assert wanted[-1].endswith(".mo")
    others = re.compile(r"test_|__pycache__|\.pyc$|docs/images|_build")
    assert [name for name in names if others.search(name)] == []
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert tops - {"callqueue"} == {top for top in tops if top.endswith(".dist-info")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tracked = subprocess.run(
        ["git", "ls-files", "callqueue"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not a checkout: nothing says which files belong to the package")
    assert [
        name for name in tracked.stdout.split() if (ROOT / name).exists() and name not in names
    ] == []


def test_it_says_what_it_is_and_brings_the_pytest_plugin(wheel: zipfile.ZipFile) -> None:
    read = {
        name.rpartition("/")[2]: wheel.read(name).decode()
        for name in wheel.namelist()
        if name.endswith((".dist-info/METADATA", ".dist-info/entry_points.txt"))
    }
    assert "callqueue.testing = callqueue.testing" in read["entry_points.txt"]
    metadata = HeaderParser().parsestr(read["METADATA"])
    assert metadata["Name"] == "django-callqueue"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Summary"] and metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    required = metadata.get_all("Requires-Dist", [])
    needed = {line.split(">")[0].strip() for line in required if "extra ==" not in line}
    assert needed == {"arrow", "celery", "django", "idna", "requests", "tzdata", "urllib3"}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_typed_application_passes_mypy_strict_and_its_mistakes_are_found(
    setup: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(USER)
    (tmp_path / "careless.py").write_text(USER + WRONG)
    (tmp_path / "shop_settings.py").write_text(
        'INSTALLED_APPS = ["django.contrib.contenttypes", "callqueue"]\nSECRET_KEY = "x"\n'
    )
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nfollow_imports = silent\n{SETUPS[setup]}"
    )
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    own = {"MYPYPATH": paths, "PYTHONPATH": paths, "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    environment = {**os.environ, **own}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "shop.py", "careless.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    said = done.stdout + done.stderr
    assert [line for line in said.splitlines() if line.startswith("shop.py")] == []
    wrong = re.findall(r"^careless\.py:(\d+): error:", said, re.MULTILINE)
    first = len(USER.splitlines()) + 2
    mistakes = len(WRONG.strip().splitlines())
    assert set(map(int, wrong)) == set(range(first, first + mistakes)), said
