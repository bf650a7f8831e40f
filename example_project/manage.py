#!/usr/bin/env python
"""Django's commands for the example project: `python example_project/manage.py migrate`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    # This file's folder has a celery.py, which must not be found in place of Celery.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
