"""What the tables with indexes of some rows only share."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage
from django.db import models

# Conditions of constraints and of indexes, and expressions in them, which MariaDB and MySQL do not
# know: callqueue/database/schema.py makes whole ones there.
MADE_OTHERWISE = ("models.W036", "models.W037", "models.W043")


class Table(models.Model):
    """A table of which Django need not warn that the database cannot have all of its indexes."""

    class Meta:
        abstract = True

    @classmethod
    def check(cls, **kwargs: Any) -> list[CheckMessage]:
        return [one for one in super().check(**kwargs) if one.id not in MADE_OTHERWISE]
