"""What the shop knows: its products and their prices, and its orders."""

from __future__ import annotations

from django.db import models


class Product(models.Model):
    """Something for sale. The vendor names the price; until it has, there is none."""

    sku = models.CharField(max_length=40, unique=True)
    price = models.DecimalField(max_digits=10, decimal_places=2, null=True)
    priced_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.sku


class Order(models.Model):
    """An order, announced in the channel of whoever packs it."""

    number = models.CharField(max_length=40, unique=True)
    channel = models.CharField(max_length=40)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.number
