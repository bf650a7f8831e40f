"""What the shop does when a call has ended."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from callqueue.models import CallQueue
from example_project.shop.models import Product


@shared_task(name="shop.price_arrived")
def price_arrived(call_id: int, status: str) -> None:
    """Keep the price that the vendor answered. A callback may come twice: the second one changes
    nothing.
    """
    if status != "done":
        return
    answer = CallQueue.objects.get(pk=call_id).answer.json()
    Product.objects.filter(sku=answer["sku"]).update(
        price=answer["price"], priced_at=timezone.now()
    )
