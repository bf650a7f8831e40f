"""docker-compose.yml: the services of a production-like setup, each watched, and no secret in the
file.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LASTING = sorted(set(SERVICES) - {"migrate"})
OURS = ["beat", "dispenser", "migrate", "web", "worker-one", "worker-two"]


def settings_of(service: str) -> dict[str, str]:
    return SERVICES[service].get("environment", {})


@pytest.mark.parametrize("service", LASTING)
def test_what_lasts_has_a_health_check_and_comes_back(service: str) -> None:
    check = SERVICES[service]["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries", "start_period"} <= set(check)
    assert SERVICES[service]["restart"] == "unless-stopped"


@pytest.mark.parametrize("service", [name for name in OURS if name != "migrate"])
def test_ours_start_once_the_servers_are_healthy_and_the_tables_are_there(service: str) -> None:
    needs = {name: need["condition"] for name, need in SERVICES[service]["depends_on"].items()}
    healthy = "service_healthy"
    assert needs == {
        "postgres": healthy,
        "rabbitmq": healthy,
        "redis": healthy,
        "migrate": "service_completed_successfully",
    }


def test_no_secret_is_in_a_file_and_what_must_be_given_is_named() -> None:
    secret = re.compile(r"PASS|SECRET|AUTH")
    for service in SERVICES:
        for name, value in settings_of(service).items():
            if secret.search(name):
                assert re.fullmatch(r"\$\{[A-Z_]+:\?[^}]+\}", value), f"{service}: {name}"
    for user, password in re.findall(r"//(\S*?):(\S*?)@", re.sub(r"\$\{[^}]*\}", "$", TEXT)):
        assert user in ("", "$")
        assert password == "$"
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert set(given) == set(re.findall(r"\$\{([A-Z_]+):\?", TEXT))
    assert all(not value for name, value in given.items() if secret.search(name))


def test_only_the_web_server_can_be_reached_and_only_from_this_machine() -> None:
    published = {service: spec["ports"] for service, spec in SERVICES.items() if "ports" in spec}
    assert list(published) == ["web"]
    assert all(port.startswith("127.0.0.1:") for port in published["web"])


def test_a_worker_gets_the_time_to_finish_a_call_and_a_dispenser_that_hangs_is_noticed() -> None:
    """Figures of the tables would be there though no dispenser ran."""
    for service in ("worker-one", "worker-two"):
        assert int(SERVICES[service]["stop_grace_period"].removesuffix("s")) >= 60
    command = SERVICES["dispenser"]["healthcheck"]["test"]
    assert command[-2:] == ["callqueue_dispenser", "--alive"]


def test_every_image_is_pinned_to_a_version() -> None:
    images = [spec["image"] for spec in SERVICES.values() if "build" not in spec]
    images += re.findall(
        r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(images) == 4
    assert all(re.search(r":\d+\.\d+", image) for image in images)


def test_every_package_of_the_image_is_pinned() -> None:
    pins = (
        (ROOT / "example_project" / "constraints.txt").read_text(encoding="utf-8").splitlines()[1:]
    )
    pinned = {line.partition("==")[0] for line in pins}
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(
            name
            for extra in ("postgres", "beat", "redis", "encryption", "metrics")
            for name in extras[extra]
        ),
    ]
    assert {re.match(r"[\w-]+", name)[0].lower() for name in wanted} | {"gunicorn"} <= pinned  # type: ignore[index]
    assert "--constraint example_project/constraints.txt" in (ROOT / "Dockerfile").read_text(
        encoding="utf-8"
    )


def test_what_is_imported_is_declared() -> None:
    """Of packages that are not Django's, Celery's or the standard library's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.match(r"[\w-]+", name)[0] for name in project["dependencies"]}  # type: ignore[index]
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "callqueue").rglob("*.py")
    )
    for name in ("idna", "requests", "urllib3"):
        assert re.search(rf"^\s*(import|from) {name}\b", sources, re.MULTILINE)
        assert name in declared


def test_the_image_copies_only_what_docker_gets_to_see() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    sent = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[:1] == "!"
    }
    copied = {
        name
        for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE)
        for name in line.split()
    }
    assert copied == sent
    assert re.search(r"^USER (?!root)", dockerfile, re.MULTILINE)
