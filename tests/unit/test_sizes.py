"""`.ci/sizes.py` on a small package that is made up here, where every number can be counted by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / ".ci" / "sizes.py"
FILES = {
    "__init__.py": "",
    "limits/__init__.py": "from callqueue.limits import kinds\n",
    "limits/kinds.py": "def is_bucket(limit):\n    return isinstance(limit, TokenBucket)\n",
    "ledger/__init__.py": "",
    "ledger/account.py": """from typing import TYPE_CHECKING

from callqueue import limits

if TYPE_CHECKING:
    from callqueue import models


def count(limit):
    \"\"\"Not counted: this docstring, and the comment below.\"\"\"
    # a comment

    if isinstance(limit, (SlidingWindow, FixedWindow)):
        return 1
    return 0
""",
    "ledger/holds.py": "def place():\n    from . import account\n    return account\n",
    "models.py": "from callqueue import managers\n" + "x = 1\n" * 210,
    "managers.py": """from callqueue.ledger import holds


def models():
    from callqueue import models
    return models


def end(calls, states):
    calls.update(status=states.DONE)
    return "%(status)s" % {"status": states}
""",
    "migrations/0001_initial.py": "x = 1\n",
}


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def sizes(script: dict[str, Any], tmp_path: Path) -> dict[str, str]:
    for name, source in FILES.items():
        path = tmp_path / "callqueue" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return script["sizes"](tmp_path / "callqueue")


def test_modules_are_counted_and_migrations_are_not(sizes: dict[str, str]) -> None:
    assert sizes["rooms: names at the top"] == "4"
    assert sizes["packages among them"] == "2"
    assert sizes["modules"] == "8"
    assert sizes["modules over 200 lines"] == "1"
    assert sizes["modules over 300 lines"] == "0"


def test_a_function_is_as_long_as_its_lines_of_code(sizes: dict[str, str]) -> None:
    assert sizes["functions"] == "5"  # of 2, 3, 3, 3 and 4 lines
    assert sizes["median function, lines of code"] == "3"
    assert sizes["functions under 20 lines of code"] == "100.0%"


def test_imports_inside_functions_are_arrows_and_those_of_types_are_not(
    sizes: dict[str, str],
) -> None:
    assert sizes["arrows between modules"] == "6"
    assert sizes["arrows between rooms"] == "4"


def test_a_circle_is_one_floor(sizes: dict[str, str]) -> None:
    assert sizes["circles of modules"] == "2"  # models and managers
    assert sizes["circles of rooms"] == "2"
    assert sizes["floors of modules"] == "5"  # managers, holds, account, limits, kinds
    assert sizes["floors of rooms"] == "3"  # managers, ledger, limits


def test_who_writes_a_status_and_who_asks_for_a_kind(sizes: dict[str, str]) -> None:
    assert sizes["modules that write a call's status"] == "1"
    assert sizes["isinstance of a limit, outside limits"] == "1"


@pytest.mark.parametrize(
    ("source", "is_write"),
    [
        ("calls.update(status=states.DONE)", True),
        ("calls.update(ready=True)", False),
        ("sql = f'UPDATE {table} SET status = {states.DONE}'", True),
        ("columns = {'status': ending.status}", True),
        ("reply = {'status': 'PENDING'}", False),
        ("text = 'It was %(status)s.' % {'status': was}", False),
    ],
)
def test_what_counts_as_writing_a_status(
    script: dict[str, Any], source: str, is_write: bool
) -> None:
    assert script["writes_status"](script["ast"].parse(source)) is is_write
