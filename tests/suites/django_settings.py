"""Settings of Django's tests of tasks."""

from __future__ import annotations

import os

from callqueue import Retry, Rule

SECRET_KEY = "of the tests, protects nothing"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "callqueue"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["CALLQUEUE_SUITE_DATABASE"],
        "TEST": {"NAME": os.environ["CALLQUEUE_SUITE_DATABASE"] + ".test"},
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;",
        },
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CALLQUEUE = {"RULES": {"default": Rule(retry=Retry(max_attempts=1))}}
CELERY_BROKER_URL = "memory://"
TEST_RUNNER = "tests.suites.django_runner.Runner"
