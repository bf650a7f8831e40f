"""Text that wants to be more than text, in every field that anybody may fill."""

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


class Page(HTMLParser):
    """What a browser would make of a page: its text, and the elements and attributes of an attacker."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.attacked: list[Any] = []
        self.text = ""
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        links = [given.get(name, "") for name in ("href", "src", "action", "formaction")]
        if (
            "attacked" in given.get("class", "").split()
            or any(name.startswith("on") for name in given)
            or any(link.strip().lower().startswith("javascript:") for link in links)
            or (tag == "script" and not given.get("src"))
        ):
            self.attacked.append((tag, attributes))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_text_of_a_call_an_answer_or_a_hold_is_markup_on_any_page(
    rules: Rules, text: str
) -> None:
    """Nor is anything exported in a form that a spreadsheet would open."""
    rules(default=Rule(limits=[SlidingWindow("100/h", per="key")]))
    there, root, shown = scene(text=text), someone(is_superuser=True), 0
    for path in there.paths(addresses()):
        answer = root.get(path, follow=True)
        if answer.status_code != 200 or "html" not in answer["Content-Type"]:
            assert answer["Content-Type"].startswith(("application/json", "text/html")), path
            continue
        assert "Content-Disposition" not in answer, path
        page = Page(answer.content.decode())
        assert page.attacked == [], path
        assert "84000" not in answer.content.decode(), path
        shown += text[:20].strip() in page.text
    assert shown > 3, "the text is on the pages, as text"


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_text_that_is_typed_in_comes_back_as_markup(rules: Rules, text: str) -> None:
    """In messages, in forms that were refused, in searches, in a rule's name that there is not."""
    rules(default=Rule(limits=[SlidingWindow("100/h")]))
    there, root = scene(), someone(is_superuser=True)
    names = ("callqueue_edit", "dashboard", "rule", "callqueue_changelist")
    args = [[there.failed.pk], [], [], []]
    edit, dashboard, rule, listed = (
        reverse(f"admin:callqueue_{name}", args=given)
        for name, given in zip(names, args, strict=True)
    )
    chosen = {"_selected_action": there.failed.pk}
    posts = [
        (edit, {"call_data": text}),
        (listed, {"action": text, **chosen}),
        (listed, {"action": "requeue_calls", "select_across": text, **chosen}),
    ]
    for do, fields in FORMS.items():
        common = {"do": do or text, "rule": "default", "limit": "default#0"}
        posts += [(dashboard, {**common, name: text}) for name in fields]
    answers = [root.post(path, form, follow=True) for path, form in posts]
    named = {"name": "default"}
    for fields in (("q",), ("q", "p", "o", "rule__exact")):
        answers.append(root.get(listed, dict.fromkeys(fields, text), follow=True))
    for fields in (("limit",), ("limit", "rate", "more", "audit")):
        answers.append(root.get(rule, {**named, **dict.fromkeys(fields, text)}, follow=True))
    for answer in answers:
        assert Page(answer.content.decode()).attacked == [], answer.request


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_curl_command_is_one_command_whatever_is_in_the_call(rules: Rules) -> None:
    """No quote ends early, nothing is expanded, and a terminal acts on none of it."""
    rules(default=Rule())
    root = someone(is_superuser=True)
    for text in (*TEXTS.values(), "'; touch /tmp/attacked; '", "$(id)`id`$HOME", "\\'", "!!"):
        params = {**telling("h1dd3n", text), "url": "https://vendor.example/"}
        call_data = {"method": "post", "params": params}
        call = CallQueue.objects.create(call_data=call_data, method="post")
        page = root.get(reverse("admin:callqueue_callqueue_change", args=[call.pk]))
        command = page.context["curl"]
        assert command.isprintable()
        words = words_of(command, shell="bash")
        assert words[0] == "--globoff"
        assert f"X-Text: {text}".replace("\r", " ").replace("\n", " ") in words
        assert len(words) == 19, words
        assert "h1dd3n" not in command
