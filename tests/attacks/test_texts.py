"""Text that wants to be more than text: markup, templates, formulas, control characters, in every
field that anybody may fill.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from django.urls import reverse

from callqueue import Rule, SlidingWindow
from callqueue.models import CallQueue
from tests.attacks.admin_site import addresses, scene, someone, telling
from tests.unit.admin.test_curl import words_of

Rules = Callable[..., None]
TEXTS = {
    "script": "</textarea></pre></script><script>window.attacked=1</script>",
    "attribute": "\"'><img src=x onerror=window.attacked=1 class=attacked>",
    "unquoted": "x onfocus=window.attacked=1 autofocus class=attacked",
    "link": "javascript:window.attacked=1//http://x/<a class=attacked href=javascript:window.attacked=1>x</a>",
    "svg": "<svg class=attacked onload=window.attacked=1><title><style>*{display:none}</style>",
    "entity": "&lt;script class=attacked&gt;&#x3c;b class=attacked&#x3e;",
    "template": "{{ 7000|add:77000 }}{% load static %}{% debug %}{{ settings.SECRET_KEY }}%(x)s{0.__class__}",
    "formula": "=cmd|' /C calc'!A0",
    "escape": "a\x1b[2J\x1b]0;owned\x07\x1b[31m\x9b\x85\u2028b\r\nCRITICAL forged",
    "bidi": "\u202e\u2066txt.exe\u2069\ufeff\u200b",
    "long": "x" * 80 + "<b class=attacked>",
}


FORMS = {
    "pause": ("rule", "key", "reason", "for", "until"),
    "resume": ("key",),
    "limit": ("limit", "rate"),
    "": ("rule",),
}


class Elements(HTMLParser):
    """What a browser would make of a page that it should not: elements and attributes of an
    attacker.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.attacked: list[Any] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if "attacked" in (given.get("class") or "").split() or any(
            name.startswith("on") for name in given
        ):
            self.attacked.append((tag, attributes))
        if any(
            (given.get(name) or "").strip().lower().startswith("javascript:")
            for name in ("href", "src", "action", "formaction")
        ):
            self.attacked.append((tag, attributes))
        if tag == "script" and not given.get("src"):
            self.attacked.append((tag, attributes))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_text_of_a_call_an_answer_or_a_hold_is_markup_on_any_page(
    rules: Rules, text: str
) -> None:
    """Nor is anything exported in a form that a spreadsheet would open: every answer is a page or
    JSON of the autocompletion.
    """
    rules(default=Rule(limits=[SlidingWindow("100/h", per="key")]))
    there, root, shown = scene(text=text), someone(is_superuser=True), 0
    for path in there.paths(addresses()):
        answer = root.get(path, follow=True)
        if answer.status_code != 200 or "html" not in answer["Content-Type"]:
            assert answer["Content-Type"].startswith(("application/json", "text/html")), path
            continue
        assert "Content-Disposition" not in answer, path
        page = answer.content.decode()
        assert Elements(page).attacked == [], path
        assert "84000" not in page, path
        shown += text[:20].strip() in _read(page)
    assert shown > 3, "the text is on the pages, as text"


def _read(page: str) -> str:
    """What a page says, its entities read."""
    said: list[str] = []
    reader = HTMLParser(convert_charrefs=True)
    reader.handle_data = said.append  # type: ignore[method-assign]
    reader.feed(page)
    return "".join(said)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_text_that_is_typed_in_comes_back_as_markup(rules: Rules, text: str) -> None:
    """In messages, in forms that were refused, in searches, in a rule's name that there is not."""
    rules(default=Rule(limits=[SlidingWindow("100/h")]))
    there, root = scene(), someone(is_superuser=True)
    dashboard, listed = (
        reverse("admin:callqueue_dashboard"),
        reverse("admin:callqueue_callqueue_changelist"),
    )
    edit = reverse("admin:callqueue_callqueue_edit", args=[there.failed.pk])
    posts = [(edit, {"call_data": text})]
    for do, names in FORMS.items():
        posts += [
            (dashboard, {"do": do or text, "rule": "default", "limit": "default#0", name: text})
            for name in names
        ]
    chosen = {"_selected_action": there.failed.pk}
    posts += [
        (listed, {"action": text, **chosen}),
        (listed, {"action": "requeue_calls", "select_across": text, **chosen}),
    ]
    for path, form in posts:
        assert Elements(root.post(path, form, follow=True).content.decode()).attacked == [], form
    rule_page = reverse("admin:callqueue_rule")
    asked = {
        listed: ("q", "p", "o", "rule__exact"),
        rule_page: ("limit", "rate", "more", "audit"),
    }
    for path, names in asked.items():
        for given in ({names[0]: text}, dict.fromkeys(names, text)):
            query = {"name": "default", **given} if path == rule_page else given
            shown = root.get(path, query, follow=True)
            assert Elements(shown.content.decode()).attacked == [], (path, given)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_curl_command_is_one_command_whatever_is_in_the_call(rules: Rules) -> None:
    """Each text stays one word of a shell: no quote ends early, nothing is expanded, and a terminal
    acts on none of it.
    """
    rules(default=Rule())
    root = someone(is_superuser=True)
    for text in (*TEXTS.values(), "'; touch /tmp/attacked; '", "$(id)`id`$HOME", "\\'", "!!"):
        params = {**telling("h1dd3n", text), "url": "https://vendor.example/"}
        call = CallQueue.objects.create(
            call_data={"method": "post", "params": params}, method="post"
        )
        command = root.get(reverse("admin:callqueue_callqueue_change", args=[call.pk])).context[
            "curl"
        ]
        assert command.isprintable()
        words = words_of(command, shell="bash")
        assert words[0] == "--globoff"
        assert f"X-Text: {text}".replace("\r", " ").replace("\n", " ") in words
        assert len(words) == 19, words
        assert "h1dd3n" not in command
