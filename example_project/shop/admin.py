"""The shop's tables in the admin."""

from __future__ import annotations

from django.contrib import admin

from example_project.shop.models import Order, Product


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ("sku", "price", "priced_at")
    search_fields = ("sku",)


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("number", "channel", "created_at")
    list_filter = ("channel",)
    search_fields = ("number",)
