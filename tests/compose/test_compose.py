"""docker-compose.yml in a real container engine: requests through the published ports, isolation, TLS, and two workers
per role. `make test-compose` runs these tests. They use separate ports and a separate project name, so they do not
disturb a running system.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from block_store.settings import BlockStoreSettings
from common.errors import LooseleafError
from looseleaf import Client, Completion
from looseleaf.both_roles.settings import BothSettings

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
HTTP_PORT, GRPC_PORT = 18000, 15051
PROJECT = "looseleaf-test"
SERVICES = {"redis", "block_store", "prefill", "decode", "gateway"}


class Compose:
    """The compose client of this machine, with our file and project name."""

    def __init__(self) -> None:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
        if not plugin and shutil.which("docker-compose") is None:
            pytest.fail("neither `docker compose` nor `docker-compose` is here")
        self._command = [*(["docker", "compose"] if plugin else ["docker-compose"]), "--project-name", PROJECT]
        self._environment = os.environ | {
            "LOOSELEAF_HTTP_PORT": str(HTTP_PORT),
            "LOOSELEAF_GRPC_PORT": str(GRPC_PORT),
            "LOOSELEAF_ARENA_SIZE": "512m",
        }

    def __call__(self, *words: str, check: bool = True) -> str:
        """Runs a command, and returns its stdout. An error shows the output."""
        done = subprocess.run(
            [*self._command, *words], cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def containers(self, service: str) -> list[str]:
        return self("ps", "-q", service).split()


def inspect(container: str) -> dict[str, object]:
    done = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)[0]
    return found


def wait_for(good: Callable[[], bool], seconds: float, otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.5)


def healthy(container: str) -> bool:
    return inspect(container)["State"]["Health"]["Status"] == "healthy"  # type: ignore[index]


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """The running, healthy services. They and their volumes are always removed at the end."""
    run = Compose()
    run("down", "--volumes", "--remove-orphans", check=False)
    try:
        run("up", "--build", "--detach")
        wait_for(
            lambda: {s for s in SERVICES if all(map(healthy, run.containers(s))) and run.containers(s)} == SERVICES,
            300,
            lambda: run("ps") + run("logs", "--tail", "30"),
        )
        yield run
    finally:
        run("down", "--volumes", "--remove-orphans", check=False)


@pytest.fixture(scope="module")
def client(compose: Compose) -> Iterator[Client]:
    with Client(f"127.0.0.1:{GRPC_PORT}", timeout=60.0) as opened:
        yield opened


def greedy(client: Client, prompt: str) -> Completion:
    return client.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)


def over_http(prompt: str) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"http://127.0.0.1:{HTTP_PORT}/v1/completions", json=body, timeout=60.0)
    assert reply.status_code == 200, reply.text
    found: dict[str, object] = reply.json()
    return found


def test_the_same_text_over_grpc_and_http(client: Client) -> None:
    completion = greedy(client, "Once upon a time")
    assert len(completion.token_ids) == 24
    assert over_http("Once upon a time")["choices"][0]["text"] == completion.text  # type: ignore[index]


def test_prefill_hands_over_through_the_shared_volume(client: Client) -> None:
    usage = greedy(client, "the leaves of a binder " * 8).usage
    assert usage.handed_over_tokens == usage.prompt_tokens
    again = greedy(client, "the leaves of a binder " * 8).usage
    assert again.computed_tokens <= 16


def test_nobody_is_root_and_every_root_is_read_only(compose: Compose) -> None:
    for service in SERVICES:
        for container in compose.containers(service):
            about = inspect(container)
            assert about["HostConfig"]["ReadonlyRootfs"] is True, service  # type: ignore[index]
            assert about["Config"]["User"].split(":")[0] not in ("", "0", "root"), service  # type: ignore[index]


def test_only_the_gateway_is_published(compose: Compose) -> None:
    published = {s for s in SERVICES for c in compose.containers(s) if inspect(c)["HostConfig"]["PortBindings"]}  # type: ignore[index]
    assert published == {"gateway"}


def test_redis_does_not_evict_and_the_gateway_has_no_torch(compose: Compose) -> None:
    asked = "export REDISCLI_AUTH=$(cat /run/looseleaf/redis-password); redis-cli "
    assert "maxmemory_policy:noeviction" in compose("exec", "-T", "redis", "sh", "-c", asked + "info memory")
    for command in ("flushall", "config get dir", "module list"):
        assert "NOPERM" in compose("exec", "-T", "redis", "sh", "-c", asked + command)
    script = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert compose("exec", "-T", "gateway", "python", "-c", script).strip() == "None"


INTRUDER = """
import socket, grpc
with socket.create_connection(("redis", 6379), 5) as redis:
    for command in ("PING", "EVAL 'return 1' 0", "FLUSHALL", "CONFIG GET *", "HGETALL looseleaf:workers"):
        redis.sendall(command.encode() + b"\\r\\n")
        print(redis.recv(1000).decode().split()[0])
calls = [
    ("block_store:50054", "BlockStoreService/Inspect"),
    ("prefill:50052", "PrefillService/Prefill"),
    ("decode:50053", "DecodeService/Session"),
]
for address, method in calls:
    try:
        next(grpc.insecure_channel(address).stream_stream("/looseleaf.v1." + method)(iter([b""]), timeout=5))
    except grpc.RpcError as error:
        print(error.code().name)
"""


def test_a_container_without_the_secrets_gets_nothing(compose: Compose) -> None:
    """A container of a different image on the same network needs the password for Redis and the secret for every
    service.
    """
    command = [
        "docker",
        "run",
        "--rm",
        "--network",
        f"{PROJECT}_default",
        "looseleaf-gateway",
        "python",
        "-c",
        INTRUDER,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["-NOAUTH"] * 5 + ["UNAUTHENTICATED"] * 3


def test_the_operator_sees_blocks(compose: Compose, client: Client) -> None:
    greedy(client, "Once upon a time")
    asked = ("looseleaf", "blocks", "127.0.0.1:50054", "--directory", "/arena")
    assert "cached" in compose("exec", "-T", "block_store", *asked)
    assert " 0 differences" in compose("exec", "-T", "block_store", "looseleaf", "fsck", "/arena")


def test_no_secret_is_in_a_command_line_or_an_environment(compose: Compose) -> None:
    found = compose(
        "exec", "-T", "block_store", "cat", "/run/looseleaf/secret", "/run/looseleaf/redis-password"
    ).split()
    assert len(found) == 2 and all(len(secret) == 64 for secret in found)
    for service in SERVICES:
        for container in compose.containers(service):
            shown = (
                json.dumps(inspect(container))
                + subprocess.run(
                    ["docker", "top", container, "-eo", "pid,args"], capture_output=True, text=True, check=True
                ).stdout
            )
            assert not any(secret in shown for secret in found), service


def test_two_of_each_serve_and_back_to_one(compose: Compose, client: Client) -> None:
    before = greedy(client, "Once upon a time").token_ids
    compose("up", "--detach", "--no-build", "--scale", "prefill=2", "--scale", "decode=2")
    for service in ("prefill", "decode"):
        wait_for(
            lambda service=service: sum(map(healthy, compose.containers(service))) == 2,  # type: ignore[misc]
            180,
            lambda service=service: compose("logs", "--tail", "30", service),  # type: ignore[misc]
        )
    # Tests each worker of a role while the other one is stopped.
    for role in ("prefill", "decode"):
        first, second = compose.containers(role)
        for stopped in (first, second):
            subprocess.run(["docker", "stop", stopped], check=True, capture_output=True)
            wait_for(lambda: answers(client, before), 60, lambda: compose("logs", "--tail", "30"))
            subprocess.run(["docker", "start", stopped], check=True, capture_output=True)
            wait_for(lambda stopped=stopped: healthy(stopped), 120, lambda: compose("logs", "--tail", "30"))  # type: ignore[misc]


def answers(client: Client, expected: tuple[int, ...]) -> bool:
    """Returns whether the system answers. If it does, checks the tokens."""
    try:
        tokens = greedy(client, "Once upon a time").token_ids
    except LooseleafError:
        return False
    assert tokens == expected
    return True


def test_the_tls_profile_serves_over_tls_and_nothing_without(compose: Compose) -> None:
    """This profile replaces the others. Its first start creates certificates."""
    compose("down", "--volumes", "--remove-orphans")
    names = {"redis", "block_store-tls", "prefill-tls", "decode-tls", "gateway-tls"}
    compose("--profile", "tls", "up", "--detach", "--no-build")
    try:
        found = lambda name: compose("--profile", "tls", "ps", "-q", name).split()  # noqa: E731
        wait_for(
            lambda: all(found(name) and all(map(healthy, found(name))) for name in names),
            300,
            lambda: compose("--profile", "tls", "logs", "--tail", "30"),
        )
        [gateway] = found("gateway-tls")
        ca = subprocess.run(
            ["docker", "exec", gateway, "cat", "/run/looseleaf/ca.pem"], capture_output=True, check=True
        )
        context = ssl.create_default_context(cadata=ca.stdout.decode())
        body = {"prompt": "Once upon a time", "max_tokens": 8}
        reply = httpx.post(f"https://localhost:{HTTP_PORT}/v1/completions", json=body, verify=context, timeout=60.0)
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] > 0
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{HTTP_PORT}/v1/models", timeout=10.0)
    finally:
        compose("--profile", "tls", "down", "--volumes", "--remove-orphans", check=False)


def test_the_gpu_profile_is_valid_and_its_processes_can_share_device_memory() -> None:
    """Without a GPU, this tests only that both share one GPU, one PID namespace and one IPC namespace."""
    services = yaml.safe_load(Compose()("--profile", "gpu", "config"))["services"]
    store, worker = services["block_store-gpu"], services["worker"]
    assert store["profiles"] == worker["profiles"] == ["gpu"]
    assert store["deploy"] == worker["deploy"]
    [device] = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["device_ids"]) == ("nvidia", ["0"])
    assert worker["pid"] == worker["ipc"] == "service:block_store-gpu"
    for service, settings in ((store, BlockStoreSettings), (worker, BothSettings)):
        settings.load(list(map(str, service["command"][3:])))  # exits if the service does not have a flag
        assert service["read_only"] is True and service["user"] == "10001:10001"
