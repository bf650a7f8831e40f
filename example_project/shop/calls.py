"""The calls that the shop owes to the vendor. Each is written down here, and made later, as the
rules allow.
"""

from __future__ import annotations

from django.conf import settings
from django.db import transaction

from callqueue.models import CallQueue
from example_project.shop.models import Order, Product


def ask_price(product: Product) -> CallQueue | None:
    """Ask what a product costs; `shop.price_arrived` gets to know when the answer is there.

    Asking again while the first question still waits asks nothing new: that is what `unique_key` is
    for.
    """
    return CallQueue.objects.send(
        {"method": "get", "params": {"url": f"{settings.VENDOR_URL}/prices/{product.sku}"}},
        rule="prices",
        unique_key=f"price of {product.sku}",
        callback="shop.price_arrived",
    )


def place_order(number: str, channel: str) -> Order:
    """Take an order and announce it. Both are in one transaction: no order without its message, no
    message without one.
    """
    with transaction.atomic():
        order = Order.objects.create(number=number, channel=channel)
        CallQueue.objects.send(
            {
                "method": "post",
                "params": {
                    "url": f"{settings.VENDOR_URL}/channels/{channel}/messages",
                    "json": {"order": number, "text": f"Order {number} is paid; please pack it."},
                },
            },
            rule="messages",
            key=channel,
        )
    return order


def upload_invoice(number: str) -> CallQueue | None:
    """Upload the invoice of an order to the vendor's archive."""
    return CallQueue.objects.send(
        {
            "method": "post",
            "params": {"url": f"{settings.VENDOR_URL}/uploads", "json": {"order": number}},
        },
        rule="uploads",
    )
