"""What the shop does when a call has ended."""

from __future__ import annotations

import json

from celery import shared_task
from django.utils import timezone

from callqueue.models import CallAttempt
from example_project.shop.models import Product


@shared_task(name="shop.price_arrived")
def price_arrived(call_id: int, status: str) -> None:
    """Keep the price that the vendor answered. A callback may come twice: the second one changes
    nothing.
    """
    if status != "done":
        return
    answer = json.loads(CallAttempt.objects.filter(call_id=call_id).latest("number").response_body)
    Product.objects.filter(sku=answer["sku"]).update(
        price=answer["price"], priced_at=timezone.now()
    )
