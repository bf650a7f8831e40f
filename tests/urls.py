from __future__ import annotations

from django.apps import apps
from django.contrib import admin
from django.urls import path

if apps.is_installed("unfold"):
    from tests.support import unfold_admin  # noqa: F401  its classes in place of the app's own

urlpatterns = [path("admin/", admin.site.urls)]
