"""docker-compose.yml: services that are watched, and no secret in the file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


TEXT, DOCKERFILE = read("docker-compose.yml"), read("Dockerfile")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OURS = ["beat", "dispenser", "web", "worker-one", "worker-two"]


def test_what_lasts_has_a_health_check_and_comes_back_once_what_it_needs_is_there() -> None:
    """A worker gets the time to finish a call; a dispenser that hangs is noticed by itself."""
    for name in set(SERVICES) - {"migrate"}:
        check = SERVICES[name]["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL")
        assert {"interval", "timeout", "retries", "start_period"} <= set(check)
        assert SERVICES[name]["restart"] == "unless-stopped"
    needed = dict.fromkeys(("postgres", "rabbitmq", "redis"), "service_healthy")
    needed["migrate"] = "service_completed_successfully"
    for name in OURS:
        needs = SERVICES[name]["depends_on"]
        assert {other: need["condition"] for other, need in needs.items()} == needed
    for name in ("worker-one", "worker-two"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= 60
    command = SERVICES["dispenser"]["healthcheck"]["test"]
    assert command[-2:] == ["callqueue_dispenser", "--alive"]


def test_no_secret_is_in_a_file_and_what_must_be_given_is_named() -> None:
    secret = re.compile(r"PASS|SECRET|AUTH")
    for service, spec in SERVICES.items():
        for name, value in spec.get("environment", {}).items():
            if secret.search(name):
                assert re.fullmatch(r"\$\{[A-Z_]+:\?[^}]+\}", value), f"{service}: {name}"
    for user, password in re.findall(r"//(\S*?):(\S*?)@", re.sub(r"\$\{[^}]*\}", "$", TEXT)):
        assert user in ("", "$")
        assert password == "$"
    given = dict(re.findall(r"^([A-Z_]+)=(.*)$", read(".env.example"), re.MULTILINE))
    assert set(given) == set(re.findall(r"\$\{([A-Z_]+):\?", TEXT))
    assert all(not value for name, value in given.items() if secret.search(name))


def test_only_the_web_server_can_be_reached_and_only_from_this_machine() -> None:
    published = {service: spec["ports"] for service, spec in SERVICES.items() if "ports" in spec}
    assert list(published) == ["web"]
    assert all(port.startswith("127.0.0.1:") for port in published["web"])


def test_every_image_and_every_package_in_it_is_pinned() -> None:
    images = [spec["image"] for spec in SERVICES.values() if "build" not in spec]
    images += re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(images) == 4
    assert all(re.search(r":\d+\.\d+", image) for image in images)
    pins = read("example_project/constraints.txt").splitlines()[1:]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in pins)
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], "gunicorn"]
    for extra in ("postgres", "beat", "redis", "encryption", "metrics"):
        wanted += project["optional-dependencies"][extra]
    names = {re.split(r"[^\w-]", name)[0].lower() for name in wanted}
    assert names <= {line.partition("==")[0] for line in pins}
    assert {"idna", "requests", "urllib3"} <= names, "what is imported is declared"
    assert "--constraint example_project/constraints.txt" in DOCKERFILE


def test_the_image_copies_only_what_docker_gets_to_see() -> None:
    sent = re.findall(r"^!(.*)$", read(".dockerignore"), re.MULTILINE)
    copied = [line.split() for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)]
    assert {name for names in copied for name in names} == set(sent)
    assert re.search(r"^USER (?!root)", DOCKERFILE, re.MULTILINE)
