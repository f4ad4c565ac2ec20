"""The manifests in deploy/kubernetes, rendered and tested without a cluster: schemas, settings, ports, drains."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from block_store.redis.private_redis import CONFINED
from block_store.settings import BlockStoreSettings
from common.settings import ServerSettings, WorkerSettings
from decode_svc.settings import DecodeSettings
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from looseleaf.both_roles.settings import BothSettings
from prefill_svc.settings import PrefillSettings

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
KUBECTL = Path(sys.executable).parent / "kubectl"
OVERLAYS = {"cpu": ("1.33", 4), "hosts": ("1.33", 5), "nvidia": ("1.34", 3), "rdma": ("1.33", 5)}
"""The version of Kubernetes whose schemas an overlay must fit, and its number of containers with our services."""
SETTINGS: dict[str, type[ServerSettings]] = {
    "gateway": GatewaySettings, "block_store": BlockStoreSettings, "prefill_svc": PrefillSettings,
    "decode_svc": DecodeSettings, "looseleaf.both_roles": BothSettings,
}  # fmt: skip
COMPONENTS = sorted(path.name for path in (ROOT / "components").iterdir())
CASES = [
    (overlay, components)
    for overlay in OVERLAYS
    for components in ((), tuple(COMPONENTS) if overlay == "cpu" else ("models", "tls"))
]
Object = dict[str, Any]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def case(request: pytest.FixtureRequest) -> tuple[str, tuple[str, ...]]:
    found: tuple[str, tuple[str, ...]] = request.param
    return found


@pytest.fixture(scope="module")
def overlay(case: tuple[str, tuple[str, ...]]) -> str:
    return case[0]


@pytest.fixture(scope="module")
def objects(case: tuple[str, tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    overlay, components = case
    directory = tmp_path_factory.mktemp("kustomization").resolve()
    use = lambda path: os.path.relpath(ROOT / path, directory)  # noqa: E731
    text = {"resources": [use(f"overlays/{overlay}")], "components": [use(f"components/{name}") for name in components]}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(text))
    done = subprocess.run([KUBECTL, "kustomize", directory], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def pods(objects: list[Object]) -> dict[str, Object]:
    return {o["metadata"]["name"]: o["spec"]["template"] for o in objects if o["kind"] in ("Deployment", "StatefulSet")}


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def environment(container: Object, objects: list[Object]) -> dict[str, str]:
    """Returns a container's environment variables as the kubelet sets them."""
    data = {o["metadata"]["name"]: o["data"] for o in objects if o["kind"] == "ConfigMap"}
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            value = data[source["configMapKeyRef"]["name"]][source["configMapKeyRef"]["key"]]
        elif "secretKeyRef" in source:
            value = "a secret of a Secret"
        elif "fieldRef" in source:
            value = "10.0.0.9"
        elif "resourceFieldRef" in source:
            value = str(math.ceil(float(container["resources"]["requests"]["cpu"])))
        else:
            value = variable["value"]
        found[variable["name"]] = value.replace("$(POD_IP)", found.get("POD_IP", ""))
    return found


def services(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Object, Object, ServerSettings]]:
    """Returns (pod, container, settings) of each of our services. The settings class exits if a variable is unknown."""
    found = []
    for pod in pods(objects).values():
        for container in containers(pod):
            if container["command"][:2] == ["python", "-m"]:
                with monkeypatch.context() as patch:
                    for name, value in environment(container, objects).items():
                        patch.setenv(name, value)
                    found.append((pod, container, SETTINGS[container["command"][2]].load(container["command"][3:])))
    return found


def test_every_object_fits_its_schema(overlay: str, objects: list[Object]) -> None:
    version, _ = OVERLAYS[overlay]
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)


def test_every_variable_is_a_setting_and_every_address_reaches_its_port(
    overlay: str, objects: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = services(objects, monkeypatch)
    assert len(found) == OVERLAYS[overlay][1]
    ports = {"gateway": set[int](), "arena": set[int]()}
    from_arenas = set[int]()
    for pod, container, settings in found:
        declared = {port["containerPort"] for port in container["ports"]}
        listens = {settings.port} | ({settings.grpc_port} if isinstance(settings, GatewaySettings) else set())
        byte_ports = {settings.byte_port} - {0} if isinstance(settings, BlockStoreSettings) else set[int]()
        from_arenas |= byte_ports
        assert declared == listens | byte_ports and settings.host == "0.0.0.0"
        assert settings.secret_file == Path("/run/looseleaf/secret")
        if isinstance(settings, WorkerSettings | BlockStoreSettings):
            assert settings.advertise == f"10.0.0.9:{settings.port}", "a pod's name resolves nowhere else"
        ports[pod["metadata"]["labels"]["app.kubernetes.io/name"].removeprefix("looseleaf-")] |= listens
    store = next(s for _, _, s in found if isinstance(s, BlockStoreSettings))
    assert all(s.block_store == f"127.0.0.1:{store.port}" for _, _, s in found if isinstance(s, WorkerSettings))
    policies = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "NetworkPolicy"}
    opened = lambda rules: {port["port"] for rule in rules for port in rule["ports"]}  # noqa: E731
    assert opened(policies["looseleaf-gateway"]["ingress"]) == ports["gateway"]
    assert opened(policies["looseleaf-arena"]["ingress"]) == ports["arena"] | from_arenas
    assert opened(policies["looseleaf-gateway"]["egress"]) == ports["arena"] | {6379, 53}
    pulls = any(isinstance(s, BlockStoreSettings) and s.pull_blocks for _, _, s in found)
    assert bool(from_arenas) == pulls, "blocks are read on a byte port"
    calls = {store.port} | from_arenas if pulls else set()
    assert opened(policies["looseleaf-arena"]["egress"]) == {6379, 53} | calls
    assert policies["looseleaf-default"].keys() == {"podSelector", "policyTypes"}, "nothing else is open"


def test_a_pod_may_take_as_long_as_its_drain(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    for pod, _, settings in services(objects, monkeypatch):
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        if isinstance(settings, GatewaySettings):
            assert grace >= settings.drain_delay + settings.drain_s + 2
        if isinstance(settings, WorkerSettings):
            assert grace >= 2 * settings.drain_s + 5, "requests, then a running step, then the store"


def test_every_pod_is_confined_and_hears_of_no_service(objects: list[Object]) -> None:
    for pod in pods(objects).values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "LOOSELEAF_GATEWAY_PORT=tcp://... would be taken for a setting"
        given = spec["securityContext"]
        assert given["runAsNonRoot"] is True and {given[n] for n in ("runAsUser", "fsGroup")} == {10001}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
        for volume in spec["volumes"]:
            assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]


def test_the_store_outlives_its_workers_and_may_hold_the_arena(objects: list[Object]) -> None:
    for pod in pods(objects).values():
        for store in pod["spec"].get("initContainers", []):
            [arena] = [v["emptyDir"] for v in pod["spec"]["volumes"] if v["name"] == "arena"]
            assert store["restartPolicy"] == "Always" and arena["medium"] == "Memory"
            assert mebibytes(store["resources"]["limits"]["memory"]) >= mebibytes(arena["sizeLimit"]) + 256
            for container in containers(pod):
                assert {"name": "arena", "mountPath": "/dev/shm"} in container["volumeMounts"]


def mebibytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)(Mi|Gi)", quantity)
    assert found is not None
    return int(found[1]) * {"Mi": 1, "Gi": 1024}[found[2]]


def test_containers_on_a_gpu_share_it(overlay: str, objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    templates = {o["metadata"]["name"] for o in objects if o["kind"] == "ResourceClaimTemplate"}
    assert bool(templates) == (overlay == "nvidia")
    for pod, container, settings in services(objects, monkeypatch):
        on_gpu = getattr(settings, "device", None) == "cuda"
        assert on_gpu == (overlay == "nvidia" and not isinstance(settings, GatewaySettings))
        assert on_gpu == ("claims" in container["resources"])
        if on_gpu:
            [claim] = pod["spec"]["resourceClaims"]
            assert container["resources"]["claims"] == [{"name": claim["name"]}]
            assert claim["resourceClaimTemplateName"] in templates
            assert pod["spec"]["shareProcessNamespace"] is True, "CUDA IPC between containers needs it"
        if isinstance(settings, BlockStoreSettings) and on_gpu:
            assert settings.num_blocks is None, "the memory profile sizes the arena"


def test_stores_of_the_overlay_rdma_have_its_device(
    overlay: str, objects: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, container, settings in services(objects, monkeypatch):
        with_nixl = isinstance(settings, BlockStoreSettings) and settings.transport == "nixl"
        assert with_nixl == (overlay == "rdma" and isinstance(settings, BlockStoreSettings))
        assert with_nixl == any(name.startswith("rdma/") for name in container["resources"]["limits"])


def test_probes_ask_what_the_services_answer(objects: list[Object]) -> None:
    for pod in pods(objects).values():
        for container in containers(pod):
            ports = {port["containerPort"] for port in container["ports"]}
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(name, {})
                assert len(probe.keys() & {"grpc", "exec", "httpGet", "tcpSocket"}) == bool(probe)
                assert "grpc" not in probe or probe["grpc"]["port"] in ports
                if "httpGet" in probe:
                    assert probe["httpGet"]["path"] == ("/health" if name == "readinessProbe" else "/version")
                if "exec" in probe and container["name"] != "redis":
                    assert probe["exec"]["command"] == ["looseleaf", "health", f"127.0.0.1:{min(ports)}"]


def test_redis_gives_services_the_rights_that_a_private_server_gives(objects: list[Object]) -> None:
    [redis] = pods(objects)["looseleaf-redis"]["spec"]["containers"]
    flags, _, config = redis["args"][0].partition("<<END")
    assert f" >$password {CONFINED}\n" in config and "$password" not in flags and "noeviction" in flags


@cache
def rules() -> list[dict[str, Any]]:
    text = (ROOT / "components/autoscaling/prometheus-adapter.yaml").read_text()
    found: list[dict[str, Any]] = yaml.safe_load(text)["rules"]["external"]
    return found


def test_autoscalers_read_metrics_that_gateways_export() -> None:
    exported = Metrics("model").render().decode()
    for rule in rules():
        [series] = re.findall(r'__name__="(\w+)"', rule["seriesQuery"])
        assert f"\n{series}{{" in exported
    scalers = list(yaml.safe_load_all((ROOT / "components/autoscaling/autoscalers.yaml").read_text()))
    asked = {m["external"]["metric"]["name"] for s in scalers for m in s["spec"]["metrics"] if m["type"] == "External"}
    assert asked == {rule["name"]["as"] for rule in rules()}
