"""Whatever a person reads in the admin is translated, and compiled as it is written."""

from __future__ import annotations

import gettext
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.catalogue import PO, TEMPLATES, entries, every_mark

PLACEHOLDER = re.compile(r"%\(\w+\)[sdr]|%[sdr]")


def test_it_holds_every_string_that_is_marked_and_no_other() -> None:
    [po] = PO
    assert po.parts[-3] == "de"
    held = [entry.message for entry in entries(po)]
    assert len(held) == len(set(held))
    assert every_mark() - set(held) == set(), "marked, and not translated: see CONTRIBUTING.md"
    assert set(held) - every_mark() == set(), "translated, and marked nowhere"


def test_every_string_is_translated_for_sure() -> None:
    for entry in entries(PO[0]):
        assert not entry.is_fuzzy, entry
        assert len(entry.translations) == (2 if entry.message.plural else 1), entry
        for text in entry.translations:
            assert text, entry
            assert sorted(PLACEHOLDER.findall(text)) == sorted(
                PLACEHOLDER.findall(entry.message.text)
            ), entry
            assert re.findall(r"</?\w+", text) == re.findall(r"</?\w+", entry.message.text), entry


def test_what_is_compiled_is_what_is_written() -> None:
    with PO[0].with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    written: dict[str | tuple[str, int], str] = {}
    for message, texts, _ in entries(PO[0]):
        key = message.text if message.context is None else f"{message.context}\x04{message.text}"
        written |= (
            {(key, place): text for place, text in enumerate(texts)}
            if message.plural
            else {key: texts[0]}
        )
    assert {key: text for key, text in compiled._catalog.items() if key} == written  # type: ignore[attr-defined]


class Words(HTMLParser):
    """The words that a page shows without asking the catalogue, read out ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        self._keep(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("aria-label", "placeholder", "title", "alt"):
                self._keep(value or "")

    def _keep(self, text: str) -> None:
        self.found += re.findall(r"[A-Za-z]{2,}", text)


UNSEEN = re.compile(
    r"{% blocktranslate.*?{% endblocktranslate %}|{% block (?:bodyclass|coltype) %}.*?{% endblock %}|{%.*?%}|{{.*?}}",
    re.DOTALL,
)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_says_nothing_that_is_not_marked(path: Path) -> None:
    words = Words()
    words.feed(UNSEEN.sub("", path.read_text("utf-8")))
    assert words.found == []
