"""What can be translated, and what is: the marks in the source as `makemessages` finds them, and
the entries of a .po file.

Needs none of gettext's programs. Changes nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from django.utils.translation.template import templatize

PACKAGE = Path(__file__).resolve().parents[2] / "callqueue"
PO = sorted((PACKAGE / "locale").glob("*/LC_MESSAGES/django.po"))
TEMPLATES = sorted(PACKAGE.glob("templates/**/*.html"))
MARKS = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy", "pgettext", "pgettext_lazy"}


class Message(NamedTuple):
    context: str | None
    text: str
    plural: str | None


class Entry(NamedTuple):
    message: Message
    translations: tuple[str, ...]
    is_fuzzy: bool


def marked(source: str) -> Iterator[Message]:
    """The messages marked in Python source."""
    for node in ast.walk(ast.parse(source)):
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Name)
            or node.func.id not in MARKS
        ):
            continue
        name = node.func.id
        texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        assert texts, f"line {node.lineno}: {name}() of something that is not written there"
        if name.startswith("p"):
            yield Message(texts[0], texts[1], None)
        elif name.startswith("n"):
            yield Message(None, texts[0], texts[1])
        else:
            yield Message(None, texts[0], None)


TEXT = r"""u?("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
TEMPLATE_MARK = re.compile(rf"\b(pgettext|ngettext|gettext|_)\(\s*{TEXT}(?:\s*,\s*{TEXT})?\s*[,)]")


def marked_in_template(path: Path) -> Iterator[Message]:
    for match in TEMPLATE_MARK.finditer(templatize(path.read_text("utf-8"), origin=str(path))):
        first, second = (
            None if text is None else ast.literal_eval(text) for text in match.group(2, 3)
        )
        if match[1] == "pgettext":
            yield Message(first, second, None)
        else:  # what ngettext has second is the plural
            yield Message(None, first, second)


def every_mark() -> set[Message]:
    found = {
        message for path in PACKAGE.rglob("*.py") for message in marked(path.read_text("utf-8"))
    }
    return found | {message for path in TEMPLATES for message in marked_in_template(path)}


def entries(path: Path) -> list[Entry]:
    """What a .po file holds, its header left out."""
    found = []
    for block in path.read_text("utf-8").split("\n\n")[1:]:
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            keyword, _, rest = line.partition(" ")
            name, rest = (name, line) if line.startswith('"') else (keyword, rest)
            fields[name] = fields.get(name, "") + ast.literal_eval(rest)
        texts = tuple(
            value for keyword, value in sorted(fields.items()) if keyword.startswith("msgstr")
        )
        message = Message(fields.get("msgctxt"), fields["msgid"], fields.get("msgid_plural"))
        found.append(Entry(message, texts, "#, fuzzy" in block))
    return found
