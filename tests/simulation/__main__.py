"""`python -m tests.simulation`: runs seeds. See `--help`."""

from __future__ import annotations

import sys

from tests.simulation.command import main

sys.exit(main(sys.argv[1:]))
