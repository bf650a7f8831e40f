"""Every page of the admin, as a browser draws it: for everyone, at any width, with or without
scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Wait
from tests.browser.test_admin_in_a_browser import text
from tests.support.length import ONLY_AT_LENGTH

pytest.importorskip("selenium", reason="selenium is not installed")
pytestmark = ONLY_AT_LENGTH
ADMIN = "/admin/callqueue"
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
Visit = Callable[[], None]
POSTED = """
const form = document.createElement("form");
form.method = "post";
form.action = arguments[0];
const token = document.querySelector("[name=csrfmiddlewaretoken]").value;
for (const [name, value] of [["csrfmiddlewaretoken", token], ...arguments[1]]) {
  const field = document.createElement("input");
  [field.type, field.name, field.value] = ["hidden", name, value];
  form.append(field);
}
document.body.append(form);
form.submit();
"""


@pytest.fixture
def pages(logged_in: Any, site: str, scene: Any, wait: Wait) -> list[tuple[str, Visit]]:
    """Each page's name, and how to get there."""
    from callqueue.models import CallAttempt, CallQueue, Hold

    scene.play()
    failed = scene.failed_payment()
    Hold.objects.create(rule="chat", per="key", value="T001", reason="its tenant asked for it")
    waiting = CallQueue.objects.filter(status=CallQueue.Status.NEW, ready=True).first()
    unknown = CallQueue.objects.unknown().first()
    running = CallQueue.objects.filter(status=CallQueue.Status.DISPATCHED).first()
    attempt = CallAttempt.objects.filter(call_id=failed.pk).first()
    assert waiting and unknown and running and attempt
    calls, board = f"{ADMIN}/callqueue", f"{ADMIN}/callqueue/dashboard"
    asked = {
        "dashboard": f"{board}/",
        "rule": f"{board}/rule/?name=stripe-pay",
        "rule, held": f"{board}/rule/?name=maps",
        "rule, audited": f"{board}/rule/?name=stripe-pay&audit=1",
        "rule, what if": f"{board}/rule/?name=chat&limit=chat%230&rate=300/m",
        "calls": f"{calls}/",
        "calls, filtered": f"{calls}/?rule__exact=chat&status__exact=3&q=T001",
        "calls, none": f"{calls}/?q=nothing-is-called-so",
        "call, failed": f"{calls}/{failed.pk}/change/",
        "call, waiting": f"{calls}/{waiting.pk}/change/",
        "call, unknown": f"{calls}/{unknown.pk}/change/",
        "call, under way": f"{calls}/{running.pk}/change/",
        "edit": f"{calls}/{failed.pk}/edit/",
        "history": f"{calls}/{failed.pk}/history/",
        "delete": f"{calls}/{failed.pk}/delete/",
        "attempts": f"{ADMIN}/callattempt/",
        "attempts, filtered": f"{ADMIN}/callattempt/?outcome__exact=throttled",
        "attempt": f"{ADMIN}/callattempt/{attempt.pk}/change/",
        "holds": f"{ADMIN}/hold/",
    }
    visits = [
        (name, lambda path=path: logged_in.get(f"{site}{path}")) for name, path in asked.items()
    ]
    selected = ("_selected_action", str(failed.pk)), ("_selected_action", str(unknown.pk))
    limit = {"do": "limit", "rule": "stripe-pay", "limit": "stripe-account", "rate": "9/m"}
    posted = {
        "requeue": (f"{calls}/", [("action", "requeue_calls"), *selected]),
        "cancel": (
            f"{calls}/", [("action", "cancel_calls"), ("_selected_action", str(waiting.pk))],
        ),
        "change a limit": (f"{board}/", [*limit.items()]),
    }  # fmt: skip

    def post(path: str, fields: list[tuple[str, str]]) -> None:
        logged_in.get(f"{site}{calls}/")
        logged_in.execute_script(POSTED, path, fields)
        wait(lambda: logged_in.execute_script("return !!document.querySelector('.cq-confirm')"))

    return visits + [(name, partial(post, *what)) for name, what in posted.items()]


def axe() -> str:
    """The program that judges a page, from whichever package has it."""
    for name in ("axe_playwright_python", "axe_core_python"):
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(folder).rglob("axe.min.js"):
                return path.read_text(encoding="utf-8")
    return ""


WIDER = """const wide = document.documentElement;
    return [wide.scrollWidth - wide.clientWidth, ...[...document.querySelectorAll(".results")]
    .map(one => one.scrollWidth - one.clientWidth)]"""
CONTROLS = """return [...document.querySelectorAll('#content a, #content button, #content summary')]
    .filter(one => one.checkVisibility()).map(one => one.tagName + ' ' + one.textContent.trim())"""
JUDGE = "const done = arguments[1]; axe.run({runOnly: arguments[0], preload: false}).then(done)"


def test_no_page_keeps_anybody_out_scrolls_sideways_or_needs_a_script(
    browser: Any, pages: list[tuple[str, Visit]]
) -> None:
    """WCAG AA, as axe judges it, in light and in dark. At the width of a small screen no list scrolls;
    on a telephone tables may, by themselves. What is shown without scripts, and every button, is what
    it is with them.
    """
    judge, found = axe(), {}
    for name, visit in pages:
        visit()
        for width in (1280, 390):
            browser.set_window_size(width, 900)
            over = browser.execute_script(WIDER)
            if max(over if width == 1280 else over[:1]) > 0:
                found[name, width] = over
        browser.set_window_size(1280, 900)
        if not name.startswith(
            ("requeue", "cancel", "change")
        ):  # which a script of this test posts
            browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
            visit()
            bare = set(browser.execute_script(CONTROLS))
            assert text(browser, "#content")
            browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
            visit()
            missing = set(browser.execute_script(CONTROLS)) - bare
            found |= {(name, one): "without scripts" for one in missing if "second" not in one}
        for scheme in ("light", "dark") if judge else ():
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            visit()
            browser.execute_script(judge)
            for one in browser.execute_async_script(JUDGE, LEVELS)["violations"]:
                targets = [" ".join(map(str, node["target"])) for node in one["nodes"]][:3]
                found[name, scheme, one["id"]] = targets
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
            browser.get_log("browser")  # of what axe does to the page
    assert not found, "\n".join(f"{where}: {what}" for where, what in found.items())
    if not judge:
        pytest.skip("axe is not installed: pip install --no-deps axe-playwright-python")
