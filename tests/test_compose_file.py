"""S21: the default security of docker-compose.yml, tested without a container engine (tests/compose runs it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from block_store.redis.private_redis import CONFINED

ROOT = Path(__file__).resolve().parents[1]
FILE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OBSERVERS = {"prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001" and service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert (not service.get("privileged") and "network_mode" not in service) or service["network_mode"] == "none"
    assert ("ports" in service) == (name.startswith("gateway") or name in OBSERVERS), "only the gateway is published"
    binds = [volume for volume in service.get("volumes", []) if volume.startswith((".", "/"))]
    assert binds in ([], ["./models:/models:ro"]) or name in OBSERVERS


@pytest.mark.parametrize("name", sorted(OBSERVERS))
def test_prometheus_and_grafana_are_reachable_from_this_host_only_and_get_no_secret(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    sources = [Path(volume.partition(":")[0]) for volume in service["volumes"]]
    assert all(volume.endswith(":ro") for volume in service["volumes"])
    assert all((ROOT / source).exists() and source.parts[:2] == ("deploy", "observe") for source in sources)


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"secrets", "certs", "redis"} - OBSERVERS))
def test_every_service_shows_the_secret_and_writes_none(name: str) -> None:
    command, volumes = SERVICES[name]["command"], SERVICES[name]["volumes"]
    assert command[command.index("--secret-file") + 1] == "/run/looseleaf/secret"
    assert "secrets:/run/looseleaf:ro" in volumes
    if "--redis-url" in command:
        assert "@" not in command[command.index("--redis-url") + 1] and "--redis-password-file" in command
    variables = SERVICES[name].get("environment", {})
    assert not any(str(value).startswith("LOOSELEAF_SERVE") for value in variables), "no secret has a value here"


def test_redis_asks_for_a_password_that_is_no_flag() -> None:
    [script] = SERVICES["redis"]["command"]
    flags, _, config = script.partition("<<END")
    assert ">$$(cat /run/looseleaf/redis-password) " in config and "redis-password" not in flags
    assert f" {CONFINED}\n" in config, "what services may do is the same as with a private server"
    assert "protected-mode no" not in script and "noeviction" in flags


def test_with_tls_every_service_has_certificates() -> None:
    for name, service in SERVICES.items():
        if service.get("profiles") == ["tls"] and name != "certs":
            names = {key.rpartition("_TLS_")[2] for key in service["environment"] if "_TLS_" in key}
            assert {"CERT", "KEY", "CA"} <= names, name


def test_requests_wait_for_the_workers_that_docker_restarts() -> None:
    gateways = [service for service in SERVICES.values() if "gateway" in service.get("command", [])]
    assert len(gateways) == 2 and all("--await-workers" in gateway["command"] for gateway in gateways)
    assert SERVICES["decode"]["restart"] == SERVICES["prefill"]["restart"] == "unless-stopped"
