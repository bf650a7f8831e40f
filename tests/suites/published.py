"""Other people's tests, from the packages that they publish, and what they showed.

In: a package and its version. Out: its source, unpacked in `.suites`, where it is looked for first;
or packages that only its tests need, in a folder for PYTHONPATH. Nothing is installed into the
environment that runs. A package that cannot be had skips the test, and says why.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

CACHE = Path(__file__).resolve().parent.parent.parent / ".suites"
CACHE.mkdir(exist_ok=True)
SECONDS = 300


def source(name: str, version: str, *, python: str = "") -> Path:
    """The unpacked source of that release; `python`: the version it is for."""
    folder = CACHE / f"{name}-{version}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            options = ["--python-version", python] if python else []
            options += ["--no-deps", "--no-binary", ":all:", "--dest", temporary]
            _pip("download", *options, f"{name}=={version}")
            (archive,) = Path(temporary).glob("*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(temporary, filter="data")
            (unpacked,) = (path for path in Path(temporary).iterdir() if path.is_dir())
            unpacked.rename(folder)
    return folder


def packages(name: str, *requirements: str, python: Path = Path(sys.executable)) -> Path:
    """A folder of these, with what they need, for PYTHONPATH."""
    digest = hashlib.sha256("\n".join([str(python), *requirements]).encode()).hexdigest()[:8]
    folder = CACHE / f"packages-{name}-{digest}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            made = Path(temporary) / "made"
            _pip("install", "--target", str(made), *requirements, python=python)
            made.rename(folder)
    return folder


def python(*least: int) -> Path:
    """A Python of at least that version: this one, or another that is on the machine."""
    if sys.version_info >= least:
        return Path(sys.executable)
    names = [f"python3.{minor}" for minor in (13, 12) if (3, minor) >= least]
    found = [Path(path) for name in names if (path := shutil.which(name))]
    found += [path for name in names for path in Path.home().glob(f".pyenv/versions/*/bin/{name}")]
    for path in found:
        if not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            return path
    pytest.skip(f"there is no Python {'.'.join(map(str, least))} or newer")


def passed(report: Path, suite: str) -> int:
    """How many pass, by a report in JUnit's form; prints the others, with their reasons."""
    assert report.exists(), f"{suite} did not run"
    count, failed = 0, {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [one for kind in ("failure", "error") for one in case.iter(kind)]
        if wrong:
            failed[f"{case.get('classname')}::{case.get('name')}"] = wrong[0].get("message") or ""
        elif case.find("skipped") is None:
            count += 1
    print(f"{suite}: {count} of {count + len(failed)} pass")
    for name, why in failed.items():
        print(f"  {name}: {why[:300]}")
    return count


def _pip(*arguments: str, python: Path = Path(sys.executable)) -> None:
    command = [str(python), "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["pip said nothing"]
        pytest.skip(f"{arguments[-1]} cannot be had: {said[-1]}")
