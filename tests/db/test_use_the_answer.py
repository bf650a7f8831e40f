"""What the page "Use the answer" shows, tried: a price, a batch, page after page."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from callqueue import Retry, Rule
from callqueue.models import CallQueue
from callqueue.testing import FakeTransport, answer, run_callqueue

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use-the-answer.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
API = "https://api.example.com"


@cache
def shown(name: str) -> Any:
    """The page's function of this name, with the others of its block."""
    (block,) = [block for block in BLOCKS if f"def {name}(" in block]
    namespace: dict[str, Any] = {"__name__": "of_the_page"}
    exec(compile(block, PAGE.name, "exec"), namespace)
    return namespace[name]


@pytest.fixture(autouse=True)
def _rules(rules: Callable[..., None]) -> None:
    rules(default=Rule(retry=Retry(max_attempts=1)))


def test_a_price_and_a_batch_of_which_all_are_done(
    callqueue_transport: FakeTransport, capsys: pytest.CaptureFixture[str]
) -> None:
    callqueue_transport.add(f"{API}/prices/rye", answer(200, json={"price": "4.50"}))
    callqueue_transport.add(f"{API}/prices/none", answer(404, json={}))
    for name, said in (("rye", r"it costs 4\.50\n"), ("none", r"no price: .*404.*\n")):
        shown("ask_for_price")(name)
        run_callqueue()
        assert re.fullmatch(said, capsys.readouterr().out)
    callqueue_transport.default = answer(200, json={"price": "1.25"})
    callqueue_transport.add(f"{API}/prices/7", 404)
    shown("start_report")(3, [str(number) for number in range(10)])
    run_callqueue()
    assert "9 of 10 prices, 11.25 together" in capsys.readouterr().out


def test_page_after_page(
    callqueue_transport: FakeTransport, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, after in ((1, f"{API}/orders?page=2"), (2, f"{API}/orders?page=3"), (3, None)):
        page = {"orders": [f"order {number}"], "next": after}
        callqueue_transport.add(f"{API}/orders?page={number}", page)
    shown("ask_for_page")(f"{API}/orders?page=1")
    run_callqueue()
    assert capsys.readouterr().out.split("\n") == [f"['order {n}']" for n in (1, 2, 3)] + [""]
    assert CallQueue.objects.done().count() == 3
