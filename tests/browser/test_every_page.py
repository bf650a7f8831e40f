"""Every page of the admin, as a browser draws it: for everyone, at any width, with or without
scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_admin_in_a_browser import Wait, find, logged_in, scene, text, wait
from tests.support.length import ONLY_AT_LENGTH

__all__ = ["logged_in", "scene", "wait"]

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


@pytest.fixture(scope="module")
def axe() -> str:
    """The program that judges a page, from whichever package has it."""
    for name in ("axe_playwright_python", "axe_core_python"):
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(folder).rglob("axe.min.js"):
                return path.read_text(encoding="utf-8")
    pytest.skip("axe is not installed: pip install --no-deps axe-playwright-python")


@pytest.fixture
def pages(logged_in: Any, site: str, scene: Any, wait: Wait) -> Iterator[tuple[str, Visit]]:
    """Each page's name, and how to get there."""
    return _pages(logged_in, site, scene, wait)


def _pages(browser: Any, site: str, scene: Any, wait: Wait) -> Iterator[tuple[str, Visit]]:
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
    for name, path in asked.items():
        yield name, lambda path=path: browser.get(f"{site}{path}")

    def post(path: str, *fields: tuple[str, str]) -> Visit:
        def visit() -> None:
            browser.get(f"{site}{calls}/")
            browser.execute_script(POSTED, path, fields)
            wait(lambda: browser.execute_script("return !!document.querySelector('.cq-confirm')"))

        return visit

    selected = ("_selected_action", str(failed.pk)), ("_selected_action", str(unknown.pk))
    yield "requeue", post(f"{calls}/", ("action", "requeue_calls"), *selected)
    yield (
        "cancel",
        post(f"{calls}/", ("action", "cancel_calls"), ("_selected_action", str(waiting.pk))),
    )
    yield (
        "change a limit",
        post(
            f"{board}/",
            ("do", "limit"),
            ("rule", "stripe-pay"),
            ("limit", "stripe-account"),
            ("rate", "9/m"),
        ),
    )


def test_nothing_keeps_anybody_out(browser: Any, pages: Any, axe: str) -> None:
    """WCAG AA, as axe judges it, in light and in dark."""
    found = {}
    for name, visit in pages:
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            visit()
            browser.execute_script(axe)
            report = browser.execute_async_script(
                "const done = arguments[1]; axe.run({runOnly: arguments[0], preload: false}).then(done)",
                LEVELS,
            )
            for one in report["violations"]:
                targets = [" ".join(map(str, node["target"])) for node in one["nodes"]][:3]
                found[name, scheme, one["id"]] = targets
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.get_log("browser")  # of what axe does to the page; other tests look at every page too
    assert not found, "\n".join(f"{where}: {what}" for where, what in found.items())


def test_no_page_scrolls_sideways(browser: Any, pages: Any) -> None:
    """Nor does a list at the width of a small screen; tables may, on a telephone, by themselves."""
    script = """const wide = document.documentElement;
        return [wide.scrollWidth - wide.clientWidth, ...[...document.querySelectorAll(".results")]
        .map(one => one.scrollWidth - one.clientWidth)]"""
    found = {}
    for name, visit in pages:
        for width in (1280, 390):
            browser.set_window_size(width, 900)
            if width == 1280:
                visit()
            over = browser.execute_script(script)
            if max(over if width == 1280 else over[:1]) > 0:
                found[name, width] = over
    browser.set_window_size(1280, 900)
    assert found == {}


def test_without_scripts_all_is_there(browser: Any, pages: Any, wait: Wait) -> None:
    """What is shown, and every button, is what it is with scripts; nothing waits to be filled in."""
    seen = {}
    for name, visit in pages:
        if name.startswith(("requeue", "cancel", "change")):
            continue  # which a script of this test posts
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
        visit()
        bare = _controls(browser)
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        visit()
        if missing := _controls(browser) - bare:
            seen[name] = missing
        assert text(browser, "#content")
    assert seen == {}
    assert find(browser, "#content")


def _controls(browser: Any) -> set[str]:
    script = """return [...document.querySelectorAll('#content a, #content button, #content summary')]
        .filter(one => one.checkVisibility()).map(one => one.tagName + ' ' + one.textContent.trim())"""
    return {one for one in browser.execute_script(script) if "second" not in one}
