"""The admin, and its static files: a real site gives those to its web server or to whitenoise."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.staticfiles.views import serve
from django.urls import path, re_path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    re_path(r"^static/(?P<path>.+)$", serve, {"insecure": True}),
]
