"""What the guides tell people to deploy: manifests for Kubernetes, units for systemd, and llms.txt."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.test_docs_code import options_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
UNITS = sorted((DOCS / "how-to" / "systemd").iterdir())
MANIFESTS = [DOCS / "how-to" / "kubernetes" / name for name in ("migrate.yaml", "shop.yaml")]


def test_manifests_can_be_applied_again_wait_for_migrations_and_name_commands() -> None:
    """A Job's template is immutable, and so is a Deployment's selector: what is applied again has no
    job, and that of the migrations has a name of its own each time, and goes away.
    """
    (job,), applied = (
        list(yaml.safe_load_all(file.read_text(encoding="utf-8"))) for file in MANIFESTS
    )
    assert (job["kind"], "name" in job["metadata"]) == ("Job", False)
    assert job["metadata"]["generateName"].endswith("-")
    assert job["spec"]["ttlSecondsAfterFinished"]
    names = [(document["kind"], document["metadata"]["name"]) for document in applied]
    assert len(set(names)) == len(names) == 4
    assert "Job" not in dict(names)
    named = []
    for document in (job, *applied):
        spec = document["spec"].get("jobTemplate", document)["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        probe = container.get("livenessProbe", {"exec": {"command": []}})
        for command in (container["command"], probe["exec"]["command"]):
            if "manage.py" in command and command[2].startswith("callqueue_"):
                named.append(command[2:])
                assert {one for one in command if one.startswith("--")} <= options_of(command[2])
        if document["kind"] == "Deployment":
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
            assert "migrate --check" in pod["initContainers"][0]["command"][-1]
            assert probe["exec"]["command"]
            assert probe["timeoutSeconds"] < probe["periodSeconds"]
            assert "cpu" not in container["resources"]["limits"]
    assert len(named) == 4
    assert ["callqueue_dispenser", "--alive"] in named


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_says_what_it_runs(unit: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit, encoding="utf-8")
    assert parser["Unit"]["Description"]
    if unit.suffix == ".timer":
        assert parser["Timer"]["OnCalendar"]
        return
    words = parser["Service"]["ExecStart"].split()
    if "manage.py" in words:
        at = words.index("manage.py") + 1
        assert set(words[at + 1 :]) <= options_of(words[at])
    else:
        assert {"worker", "--queues"} <= set(words)
        assert int(parser["Service"]["TimeoutStopSec"]) >= 60


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Paths and the user are another machine's."""
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8").replace("User=shop\n", "")
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text.replace("/srv/shop", "/"), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [
        line for line in done.stderr.splitlines() if "/shop-" in line or line.startswith("shop-")
    ]
    assert (done.returncode, said) == (0, []), done.stderr


def test_llms_txt_lists_every_page_once_and_no_other() -> None:
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# callqueue\n\n> ")
    listed = re.findall(r"\]\(([^)]+)\): \S", text)
    pages = {
        str(page.relative_to(DOCS))
        for page in DOCS.rglob("*.md")
        if page.name != "index.md" and "_build" not in page.parts
    }
    assert sorted(listed) == sorted(pages)
