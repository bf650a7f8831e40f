"""Settings of the example project; its servers come from the environment, and without any it runs
on files.

DATABASE_URL, CELERY_BROKER_URL and CACHE_URL (see servers.py), VENDOR_URL, DJANGO_SECRET_KEY,
DJANGO_ALLOWED_HOSTS, DJANGO_DEBUG.
"""

from __future__ import annotations

import os
from pathlib import Path

import callqueue
from callqueue import Retry, Rule, SlidingWindow
from example_project import servers

HERE = Path(__file__).resolve().parent

# The vendor's API. `python -m example_project.vendor --port 8001` stands in for it.
VENDOR_URL = os.environ.get("VENDOR_URL", "http://127.0.0.1:8001")

# The vendor's terms: 5 price requests a second; one message a second and channel; and 8 calls a
# second for the whole workspace, which messages and uploads share.  `strict`: a call ages from its
# answer, so that no delay on a busy machine can bring two calls nearer to each other than they were
# released. The default trusts the network to within 50 ms, and loses nothing to a slow API.
workspace = SlidingWindow("8/s", name="workspace", strict=True)
retry = Retry(max_attempts=3, base=0.5, cap=5.0)

CALLQUEUE = {
    "RULES": {
        "prices": Rule(limits=[SlidingWindow("5/s", strict=True)], retry=retry),
        "messages": Rule(
            queues=["egress-1", "egress-2"],
            limits=[SlidingWindow("1/s", per="key", strict=True), workspace],
            retry=retry,
        ),
        "uploads": Rule(queues="egress-2", limits=[workspace], retry=retry),
    },
    # The stand-in listens on this machine, where calls may not go unless it is said.
    "ALLOWED_NETWORKS": ["127.0.0.0/8"] if VENDOR_URL.startswith("http://127.") else [],
}

for _name, _value in servers.broker(os.environ.get("CELERY_BROKER_URL", "filesystem://")).items():
    globals()[_name] = _value
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_BEAT_SCHEDULE = callqueue.beat_schedule()

DATABASES = {
    "default": servers.database(os.environ.get("DATABASE_URL", f"sqlite:///{HERE / 'db.sqlite3'}"))
}
CACHES = {"default": servers.cache(os.environ.get("CACHE_URL", ""))}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DEBUG = os.environ.get("DJANGO_DEBUG", "") in ("1", "true", "yes")
# Without a key in the environment there is one for this process only: sessions then end with it.
SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY") or os.urandom(32).hex()
ALLOWED_HOSTS = os.environ.get("DJANGO_ALLOWED_HOSTS", "localhost,127.0.0.1").split(",")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "callqueue",
    "example_project.shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"callqueue": {"handlers": ["console"], "level": "INFO", "propagate": False}},
}
