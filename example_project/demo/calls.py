"""The calls of the demo: what is sent, and how each of them must end.

The vendor tells by the name: `flaky-` fails twice and then works, `broken-` fails always, `gone-`
is not there.
"""

from __future__ import annotations

from collections.abc import Iterator

from django.db import transaction

RULES = ("prices", "messages", "uploads")
CHANNELS = ("berlin", "lagos", "lima", "osaka", "oslo", "pune")
COUNTS = {"prices": 110, "messages": 90, "uploads": 100}
FLAKY, BROKEN, GONE = (
    (13, 29),
    (17,),
    (23, 41),
)  # which of each rule's calls, early enough for retries to fit


def send_all() -> int:
    """Send all calls, as the shop does; the count of them."""
    from example_project.shop.calls import ask_price, place_order, upload_invoice
    from example_project.shop.models import Product

    with transaction.atomic():
        for name in names_of("prices"):
            ask_price(Product.objects.create(sku=name))
        for number, name in enumerate(names_of("messages")):
            place_order(name, CHANNELS[number % len(CHANNELS)])
        for name in names_of("uploads"):
            upload_invoice(name)
    return sum(COUNTS.values())


def names_of(rule: str) -> Iterator[str]:
    """The names that the vendor goes by, in the order in which the calls are sent."""
    for number in range(1, COUNTS[rule] + 1):
        yield f"{kind_of(number)}-{rule}-{number:03}"


def kind_of(number: int) -> str:
    if number in GONE:
        return "gone"
    if number in BROKEN:
        return "broken"
    return "flaky" if number in FLAKY else "plain"


def name_of(call_data: dict[str, object]) -> str:
    """The name in a call's `call_data`."""
    params = call_data["params"]
    assert isinstance(params, dict)
    return (
        str(params["json"]["order"]) if "json" in params else str(params["url"]).rpartition("/")[2]
    )


def expected_status(name: str) -> str:
    """How the call of that name must end."""
    return "failed" if name.startswith(("gone-", "broken-")) else "done"
