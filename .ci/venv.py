"""Make `.venv`, and keep it in step with pyproject.toml.

In: the extras to install. Out: a virtual environment at `.venv`, and nothing else on the machine
touched. Does nothing, in some 30 ms, when what pyproject.toml asks for is there already. Safe to
run twice at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYPROJECT = ROOT / "pyproject.toml"


def main(extras: list[str]) -> int:
    if sys.version_info < (3, 11):
        print(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 1
    with PYPROJECT.open("rb") as pyproject:
        fcntl.flock(pyproject, fcntl.LOCK_EX)
        fingerprint = fingerprint_of(pyproject.read())
        if any(is_installed(extra, fingerprint) for extra in installing(extras)):
            return 0
        if VENV.is_symlink():  # another checkout's, which would be emptied
            return 0
        if not is_usable(fingerprint):
            create()
        return install(extras, fingerprint)


def fingerprint_of(pyproject: bytes) -> str:
    """What the environment depends on: the requirements, the place (scripts hold its path), this
    file.
    """
    parts = [pyproject, Path(__file__).read_bytes(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def installing(extras: list[str]) -> list[str]:
    """The stamps that would do: the extras themselves, or `dev`, which holds them all."""
    return [stamp_name(extras), "dev"]


def stamp_name(extras: list[str]) -> str:
    return "+".join(sorted(extras))


def is_installed(name: str, fingerprint: str) -> bool:
    stamp = VENV / f".stamp-{name}"
    return (
        stamp.is_file() and stamp.read_text() == fingerprint and (VENV / "bin" / "python").exists()
    )


def is_usable(fingerprint: str) -> bool:
    """Whether some extras are there already, of the same requirements, so that others can be
    added.
    """
    stamps = VENV.glob(".stamp-*")
    return (VENV / "bin" / "python").exists() and any(
        stamp.read_text() == fingerprint for stamp in stamps
    )


def create() -> None:
    print(f"Making .venv with Python {sys.version.split()[0]}", flush=True)
    arguments = ["--clear"] if has_pip_to_give() else ["--clear", "--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *arguments, str(VENV)], check=True)


def has_pip_to_give() -> bool:
    """Debian's Python comes without ensurepip unless python3-venv is installed."""
    return importlib.util.find_spec("ensurepip") is not None


def install(extras: list[str], fingerprint: str) -> int:
    requirement = f".[{','.join(extras)}]"
    print(f"Installing {requirement} into .venv", flush=True)
    command = [
        *pip(),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--editable",
        requirement,
    ]
    status = subprocess.run(command, cwd=ROOT, env=clean_environment()).returncode
    if status == 0:
        (VENV / f".stamp-{stamp_name(extras)}").write_text(fingerprint)
    return status


def pip() -> list[str]:
    if (VENV / "bin" / "pip").exists():
        return [str(VENV / "bin" / "python"), "-m", "pip"]
    return [sys.executable, "-m", "pip", "--python", str(VENV / "bin" / "python")]


def clean_environment() -> dict[str, str]:
    unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
