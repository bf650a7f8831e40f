"""Markup in every field, and a real browser that would run it."""

from __future__ import annotations

from typing import Any

import pytest

from callqueue import Rule, SlidingWindow

pytest.importorskip("selenium", reason="selenium is not installed")

ATTACKED = "return window.attacked || document.querySelectorAll('.attacked, img[src=x]').length"


@pytest.mark.slow
def test_no_page_runs_or_draws_what_a_call_or_an_answer_says(
    browser: Any, site: str, settings: Any
) -> None:
    """Every address of the app. What the site's policy stops, the browser complains of, and that
    fails the test too.
    """
    from tests.attacks.admin_site import addresses, scene, someone
    from tests.attacks.test_texts import TEXTS

    settings.CALLQUEUE = {"RULES": {"default": Rule(limits=[SlidingWindow("100/h", per="key")])}}
    there = scene(text="".join(TEXTS[name] for name in ("attribute", "svg"))[:100])
    scene(text=TEXTS["script"])
    scene(text=TEXTS["link"])
    browser.get(f"{site}/static/admin/css/base.css")
    root = someone(is_superuser=True)
    browser.add_cookie({"name": "sessionid", "value": root.cookies["sessionid"].value, "path": "/"})
    for path in there.paths(addresses()):
        if root.get(path).status_code == 200:
            browser.get(f"{site}{path}")
            assert not browser.execute_script(ATTACKED), path
    browser.execute_script("document.body.innerHTML += '<b class=attacked>'")
    assert browser.execute_script(ATTACKED), "it would be seen"
