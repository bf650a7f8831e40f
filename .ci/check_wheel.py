"""Check that the newest wheel in a folder holds all of the package and nothing else.

In: the folder. Out: exit status 1, and what is missing or should not be there. Never changes the
wheel.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = [
    "callqueue/__init__.py",
    "callqueue/py.typed",
    "callqueue/models/__init__.py",
    "callqueue/migrations/0001_initial.py",
]


def main(folder: str) -> int:
    wheels = sorted(Path(folder).glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        print(f"No wheel in {folder}.")
        return 1
    inside = set(zipfile.ZipFile(wheels[-1]).namelist())
    problems = [f"missing: {name}" for name in sorted((package_files() | set(NEEDED)) - inside)]
    problems += [f"does not belong: {name}" for name in sorted(inside) if not belongs(name)]
    if not any(name.endswith("licenses/LICENSE") for name in inside):
        problems.append("missing: LICENSE")
    print(
        "\n".join([*problems, f"{wheels[-1].name}: {len(inside)} files, {len(problems)} problems"])
    )
    return 1 if problems else 0


def package_files() -> set[str]:
    """What git knows of the package: code, templates, static files, translations."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "callqueue"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return set()
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def belongs(name: str) -> bool:
    top = name.split("/", 1)[0]
    return top == "callqueue" or (
        top.startswith("django_callqueue-") and top.endswith(".dist-info")
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
