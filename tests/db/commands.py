"""Runs a management command in this process: its exit code, and what it said on each stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import StringIO
from typing import Any

from django.core.management import call_command
from django.core.management.base import CommandError


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    error: str

    @property
    def document(self) -> Any:
        """What a command that was asked for JSON said: one document and nothing else."""
        return json.loads(self.out)


def run(name: str, *arguments: str) -> Ran:
    out, err = StringIO(), StringIO()
    try:
        call_command(f"callqueue_{name}", *arguments, stdout=out, stderr=err)
    except CommandError as error:
        return Ran(error.returncode, out.getvalue(), f"{err.getvalue()}{error}")
    return Ran(0, out.getvalue(), err.getvalue())
