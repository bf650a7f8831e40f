"""django-tasks-db: Django settings, and a program: `python with_django_tasks.py migrate | enqueue
URL COUNT | db_worker`.
"""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

_url = urlsplit(os.environ["RIVAL_DSN"])
SECRET_KEY = "of the benchmark, protects nothing"
USE_TZ = True
INSTALLED_APPS = ["django_tasks", "django_tasks_db"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _url.path[1:],
        "HOST": _url.hostname,
        "PORT": _url.port,
        "USER": _url.username,
        "PASSWORD": _url.password or "",
    }
}
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}


def main(what: str, *arguments: str) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "with_django_tasks"
    import django

    django.setup()
    if what == "apart":
        import django_tasks_call
        from apart import send_apart

        send_apart(lambda: django_tasks_call.call.enqueue(arguments[0]), int(arguments[1]))
        return
    if what != "enqueue":
        from django.core.management import execute_from_command_line

        execute_from_command_line(["manage", what, *arguments])
        return
    import django_tasks_call

    for _ in range(int(arguments[1])):
        django_tasks_call.call.enqueue(arguments[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
