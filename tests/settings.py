"""Django settings of the tests, for pytest and for the workers and dispensers that tests start.

In: environment variables that begin with CALLQUEUE_TEST_. `DATABASE` is postgresql, mariadb or
sqlite; `DB_NAME` is the database that a subprocess shares with the test; `BROKER_URL`,
`BROKER_FOLDER` and `QUEUE` name the broker; `PG_URL` and `MARIADB_URL` say where the servers are;
`THEME` is a theme of the admin; `SETTINGS` is the dotted path of a module whose upper-case names are added last (a test's own
CALLQUEUE). Never talks to a server.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import django

from tests.celery_app import app as celery_app  # noqa: F401  shared tasks must find this application
from tests.support.servers import ServerUrl, mariadb_url, postgresql_url

SECRET_KEY = "of the tests, protects nothing"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_beat",
    "callqueue",
]
# Their tables are made as their models are (`migrate --run-syncdb`), and not by one migration after
# the other.
MIGRATION_MODULES = dict.fromkeys(
    ("admin", "auth", "contenttypes", "django_celery_beat", "sessions")
)
if "CALLQUEUE_TEST_THEME" in os.environ:
    INSTALLED_APPS.insert(0, os.environ["CALLQUEUE_TEST_THEME"])
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
_MAIL = "django.core.mail.backends.locmem.EmailBackend"
if django.VERSION < (6, 1):
    EMAIL_BACKEND = _MAIL
else:
    MAILERS = {"default": {"BACKEND": _MAIL}}


def _database(vendor: str) -> dict[str, Any]:
    """Under a name of this process's own, unless the environment names the test's."""
    name = os.environ.get("CALLQUEUE_TEST_DB_NAME", f"callqueue_{os.getpid()}")
    if vendor == "sqlite":
        return _sqlite(name)
    if vendor == "mariadb":
        _use_pymysql()
        options = {"charset": "utf8mb4", "isolation_level": "read committed"}
        collation = {"CHARSET": "utf8mb4", "COLLATION": "utf8mb4_general_ci"}  # as most have it
        return _server("django.db.backends.mysql", name, mariadb_url(), options, collation)
    if vendor == "postgresql":
        return _server("django.db.backends.postgresql", name, postgresql_url(), {}, {})
    raise ValueError(
        f"CALLQUEUE_TEST_DATABASE is {vendor!r}; it may be postgresql, mariadb or sqlite."
    )


def _sqlite(name: str) -> dict[str, Any]:
    """A file, since tests of races need several connections; a subprocess gets its path as name."""
    folder = os.environ.get("CALLQUEUE_TEST_SQLITE_FOLDER", tempfile.gettempdir())
    is_path = os.sep in name or name == ":memory:"
    path = name if is_path else str(Path(folder) / f"{name}.sqlite3")
    options = {
        "timeout": 20,
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
    test, engine = {"NAME": f"{path}.test"}, "django.db.backends.sqlite3"
    return {"ENGINE": engine, "NAME": path, "OPTIONS": options, "TEST": test}


def _server(
    engine: str, name: str, url: ServerUrl, options: dict[str, Any], test: dict[str, str]
) -> dict[str, Any]:
    place = {"HOST": url.host, "PORT": url.port, "USER": url.user, "PASSWORD": url.password}
    own = {"ENGINE": engine, "NAME": name, "OPTIONS": options}
    return {**own, **place, "TEST": {"NAME": f"test_{name}", **test}}


def _use_pymysql() -> None:
    """In the place of mysqlclient, which needs a compiler; Django asks for the latter's version."""
    import pymysql

    pymysql.version_info = (2, 2, 7, "final", 0)
    pymysql.__version__ = "2.2.7"
    pymysql.install_as_MySQLdb()


DATABASES = {"default": _database(os.environ.get("CALLQUEUE_TEST_DATABASE", "postgresql"))}

CALLQUEUE: dict[str, Any] = {}

CELERY_BROKER_URL = os.environ.get("CALLQUEUE_TEST_BROKER_URL", "memory://")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_TIMEOUT = 3
CELERY_TASK_DEFAULT_QUEUE = os.environ.get("CALLQUEUE_TEST_QUEUE", "celery")
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_SERIALIZER = "json"
CELERY_RESULT_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {}
if "CALLQUEUE_TEST_BROKER_FOLDER" in os.environ:
    _folder = Path(os.environ["CALLQUEUE_TEST_BROKER_FOLDER"])
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(_folder / "messages"),
        "data_folder_out": str(_folder / "messages"),
        "control_folder": str(_folder / "control"),
    }

if "CALLQUEUE_TEST_SETTINGS" in os.environ:
    _module = importlib.import_module(os.environ["CALLQUEUE_TEST_SETTINGS"])
    globals().update({name: getattr(_module, name) for name in dir(_module) if name.isupper()})
