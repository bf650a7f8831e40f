"""Django settings of a simulated run: those of the tests, with no more apps than callqueue needs."""

from tests.settings import *  # noqa: F403

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "callqueue"]
MIDDLEWARE: list[str] = []

if DATABASES["default"]["ENGINE"].endswith("sqlite3"):  # noqa: F405
    # Whoever finds it locked waits for his turn, not inside the driver; and no disk is waited for.
    DATABASES["default"]["OPTIONS"] |= {  # noqa: F405
        "timeout": 0,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;",
    }
