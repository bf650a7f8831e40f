"""What the guides tell people to deploy: manifests for Kubernetes, units for systemd, and llms.txt."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.test_docs_code import options_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
UNITS = sorted((DOCS / "how-to" / "systemd").iterdir())
MANIFESTS = [DOCS / "how-to" / "kubernetes" / name for name in ("migrate.yaml", "shop.yaml")]


def manifests() -> list[list[dict[str, Any]]]:
    """The job, and what is applied: each with its documents."""
    return [list(yaml.safe_load_all(file.read_text(encoding="utf-8"))) for file in MANIFESTS]


def applied() -> list[dict[str, Any]]:
    return manifests()[1]


def pods(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"].get("jobTemplate", document)["spec"]
    return dict(spec["template"]["spec"])


def test_what_is_applied_can_be_applied_again() -> None:
    """A Job's template is immutable, and so is a Deployment's selector."""
    assert [document["kind"] for document in applied()].count("Job") == 0
    names = [(document["kind"], document["metadata"]["name"]) for document in applied()]
    assert len(set(names)) == len(names) == 4
    for document in applied():
        if document["kind"] == "Deployment":
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"] == labels


def test_the_job_for_migrations_has_a_name_of_its_own_each_time_and_goes_away() -> None:
    (job,) = manifests()[0]
    assert (job["kind"], "name" in job["metadata"]) == ("Job", False)
    assert job["metadata"]["generateName"].endswith("-")
    assert job["spec"]["ttlSecondsAfterFinished"]


def test_new_pods_wait_for_the_migrations_and_are_noticed_when_they_hang() -> None:
    for document in applied():
        if document["kind"] != "Deployment":
            continue
        pod = pods(document)
        assert "migrate --check" in pod["initContainers"][0]["command"][-1]
        (container,) = pod["containers"]
        probe = container["livenessProbe"]
        assert probe["exec"]["command"]
        assert probe["timeoutSeconds"] < probe["periodSeconds"]
        assert "cpu" not in container["resources"]["limits"]
    dispenser = pods(applied()[0])["containers"][0]
    assert dispenser["livenessProbe"]["exec"]["command"][-2:] == ["callqueue_dispenser", "--alive"]


def test_every_command_in_the_manifests_is_there() -> None:
    checked = 0
    for document in [*manifests()[0], *applied()]:
        for container in pods(document)["containers"]:
            for command in (
                container["command"],
                container.get("livenessProbe", {}).get("exec", {}).get("command", []),
            ):
                if "manage.py" in command and command[2].startswith("callqueue_"):
                    checked += 1
                    assert {word for word in command if word.startswith("--")} <= options_of(
                        command[2]
                    )
    assert checked == 4


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
