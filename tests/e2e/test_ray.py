"""Two Ray nodes in two network namespaces: a deployment comes up, workers and a node are killed, and its numbers of
workers change. No token differs from the oracle's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.types import SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from looseleaf import AsyncClient
from looseleaf.explanation import Explanation
from testing.oracle import Oracle
from testing.ray_nodes import RayNodes, obstacle
from testing.system import prompts, wait_for
from testing.two_hosts import LINK

NUM_TOKENS = 160
BACK_S = 150.0
GREEDY = SamplingParams(temperature=0.0)
Groups = dict[str, dict[str, Any]]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[RayNodes]:
    """Two Ray nodes with a deployment of two hosts, each with a prefill and a decode worker."""
    if (why := obstacle()) is not None:
        pytest.skip(why)
    file = tmp_path_factory.mktemp("ray") / "cluster.yaml"
    file.write_text(
        f"model: {checkpoint}\nhosts: 2\nprefill: 2\ndecode: 2\nthreads: 1\nspare: 0\nhost: 0.0.0.0\n"
        "num_blocks: 1024\nmax_model_len: 1024\nmax_num_batched_tokens: 128\n"
    )
    with RayNodes(num_cpus=5) as running:
        began = time.monotonic()
        assert "\n  says  " in running.looseleaf("up", str(file))
        show("up", began)
        yield running


def show(what: str, began: float) -> None:
    """Prints a duration since `began`, for the log."""
    print(f"{what}: {time.monotonic() - began:.1f} s")


def oracle_of(checkpoint: Path, reduction_parts: int) -> Oracle:
    settings = RunnerSettings(
        model=str(checkpoint), max_model_len=1024, num_threads=1, deterministic=True, reduction_parts=reduction_parts
    )
    return Oracle(ModelRunner(settings))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return oracle_of(checkpoint, 1)


class Traffic:
    """Requests that run at the same time, and the tokens that they must have."""

    def __init__(self, nodes: RayNodes, oracle: Oracle, seed: int) -> None:
        self.prompts = prompts(10, seed=seed, lengths=(20, 120))
        self.right = [tuple(oracle.generate(p, GREEDY, StoppingParams(max_tokens=NUM_TOKENS))) for p in self.prompts]
        _, grpc_port = (address.rpartition(":")[2] for address in nodes.groups()["front"]["addresses"])
        self._address = f"{LINK[0]}:{grpc_port}"
        self.first_tokens = 0

    async def run(self, disturb: Callable[[], object] | None = None) -> list[Explanation]:
        """Streams all requests, checks their tokens, and returns their explanations. Calls `disturb` when half of the
        streams have their first tokens.
        """
        async with AsyncClient(self._address) as client:
            streams = [asyncio.create_task(self._stream(client, prompt)) for prompt in self.prompts]
            if disturb is not None:
                while self.first_tokens < len(streams) // 2:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(disturb)
            assert await asyncio.gather(*streams) == self.right
            return list(await client.explain(limit=len(streams)))

    async def _stream(self, client: AsyncClient, prompt: list[int]) -> tuple[int, ...]:
        tokens: list[int] = []
        stream = client.stream(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=BACK_S)
        async for delta in stream:
            self.first_tokens += not tokens
            tokens += delta.token_ids
        return tuple(tokens)


def are_ready(groups: Groups, num_hosts: int = 2) -> bool:
    states = [group["state"] for group in groups.values()]
    services = [state for group in groups.values() for state in group.get("services", {}).values()]
    return len(groups) == num_hosts + 1 and set(states) | set(services) == {"ready"}


def wait_ready(nodes: RayNodes, good: Callable[[Groups], bool] = are_ready) -> Groups:
    return wait_for(
        nodes.groups, lambda groups: are_ready(groups, len(groups) - 1) and good(groups), BACK_S, "not back"
    )


def actor_pid(nodes: RayNodes, kind: str, host: int = 0) -> int:
    """Returns the process id of the only Ray actor of this class on a node."""
    [pid] = [
        pid for pid in nodes.pids(host) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{kind}".encode())
    ]
    return pid


def on_node(groups: Groups, host: int) -> str:
    """Returns the name of the group of a block store with its workers on this node."""
    [name] = [n for n, group in groups.items() if n != "front" and group["node"] == LINK[host]]
    return name


async def test_each_host_has_a_node_and_all_tokens_are_right(nodes: RayNodes, oracle: Oracle) -> None:
    groups = nodes.groups()
    assert {group["node"] for name, group in groups.items() if name != "front"} == set(LINK)
    assert all(group["plan"]["cpus"] == 2 for name, group in groups.items() if name != "front")
    found = await Traffic(nodes, oracle, seed=80).run()
    hosts = {attempt.decode_worker.rpartition("-decode")[0] for done in found for attempt in done.attempts}
    assert hosts == {"host-0", "host-1"}


@pytest.mark.parametrize(
    "text,reason",
    [
        ("", "name: the deployment 'looseleaf' is already there"),
        (
            "name: other\nhosts: 3\nprefill: 2\ndecode: 2\nthreads: 1",
            "hosts: 3 is more than the nodes with 2 CPUs or more",
        ),
        ("name: other\nthreads: 3", "hosts: 1 is more than the nodes with 6 CPUs or more"),
        ("name: other\nthreads: 1\nmodel: /nowhere", "/nowhere"),
        ("name: other\nthreads: 1\nport: 0\ngrpc_port: 0", "front: redis_port: port 6390"),
    ],
)
def test_a_deployment_that_cannot_start_says_why_and_leaves_nothing(
    nodes: RayNodes, tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    refused = nodes.run("up", str(file))
    assert refused.returncode == 1 and reason in refused.stderr
    other = nodes.run("status", "--name", "other")
    assert other.returncode == 1 and "the deployments are looseleaf" in other.stderr
    assert are_ready(nodes.groups())


BROKEN = """
from looseleaf.cluster import ray_cluster
class Broken:
    def __init__(self): import a_module_that_this_node_lacks
    def status(self): return {}
ray_cluster.connect("auto")
actor = ray_cluster.create_on_head(Broken, "broken")
print(ray_cluster.call_all({"host-0": actor}, "status", 60.0))
ray_cluster.kill(actor)
"""


def test_an_actor_that_its_node_cannot_create_is_dead_and_says_why(nodes: RayNodes) -> None:
    done = subprocess.run(
        [*nodes.spaces[0].enter, sys.executable, "-c", BROKEN], env=nodes.environment, capture_output=True, text=True
    )
    assert "Dead(reason=" in done.stdout and "a_module_that_this_node_lacks" in done.stdout, done.stderr


async def test_a_killed_worker_comes_back_on_its_node(nodes: RayNodes, oracle: Oracle) -> None:
    before = nodes.groups()
    victim = on_node(before, 1)
    pid = before[victim]["pids"]["decode-0"]
    killed = time.monotonic()
    found = await Traffic(nodes, oracle, seed=81).run(lambda: os.kill(pid, signal.SIGKILL))
    assert any(len(done.attempts) > 1 for done in found), "the kill hit no stream"
    after = wait_ready(nodes, lambda groups: groups[victim]["pids"]["decode-0"] != pid)
    show("a killed worker is back", killed)
    assert after[victim]["node"] == LINK[1]
    assert after[victim]["pids"]["block_store"] == before[victim]["pids"]["block_store"]
    assert "was killed by signal 9; starting it again" in nodes.looseleaf("status", "--logs", victim)


async def test_workers_are_added_and_removed_while_requests_run(nodes: RayNodes, oracle: Oracle) -> None:
    await Traffic(nodes, oracle, seed=82).run(lambda: nodes.looseleaf("scale", "decode=3"))
    groups = wait_ready(nodes, lambda groups: len(groups) == 4)
    assert set(groups["host-2"]["pids"]) == {"block_store", "decode-0"}
    os.kill(actor_pid(nodes, "Deployment"), signal.SIGKILL)
    assert wait_ready(nodes, lambda groups: len(groups) == 4)["host-2"]["plan"] == groups["host-2"]["plan"]
    found = await Traffic(nodes, oracle, seed=83).run(lambda: nodes.looseleaf("scale", "decode=2"))
    assert any(attempt.decode_worker == "host-2-decode-0" for done in found for attempt in done.attempts)
    wait_ready(nodes, lambda groups: len(groups) == 3)
    refused = nodes.run("scale", "decode=9")
    assert refused.returncode == 1 and "no node has 1 free CPUs for another worker" in refused.stderr
    assert are_ready(nodes.groups())


async def test_an_actor_that_is_killed_is_started_again_by_ray(nodes: RayNodes, oracle: Oracle) -> None:
    victim = on_node(before := nodes.groups(), 1)
    pid = before[victim]["pids"]["decode-0"]
    await Traffic(nodes, oracle, seed=84).run(lambda: os.kill(actor_pid(nodes, "HostActor", 1), signal.SIGKILL))
    wait_ready(nodes, lambda groups: groups[victim].get("pids", {}).get("decode-0", pid) != pid)


async def test_a_killed_front_comes_back_with_the_same_addresses(nodes: RayNodes, oracle: Oracle) -> None:
    before = nodes.groups()
    os.kill(actor_pid(nodes, "FrontActor"), signal.SIGKILL)
    pids = before["front"]["pids"]
    after = wait_ready(nodes, lambda groups: groups["front"]["pids"] != pids)
    assert after["front"]["addresses"] == before["front"]["addresses"]
    assert {name: after[name]["pids"] for name in after if name != "front"} == {
        name: before[name]["pids"] for name in before if name != "front"
    }
    await Traffic(nodes, oracle, seed=87).run()


async def test_the_replicas_of_a_lost_node_come_back_on_the_other(nodes: RayNodes, oracle: Oracle) -> None:
    before = nodes.groups()
    lost, kept = on_node(before, 1), on_node(before, 0)
    killed = time.monotonic()
    found = await Traffic(nodes, oracle, seed=85).run(lambda: nodes.kill_node(1))
    show("a node was killed, and all streams have ended", killed)
    own = {f"{kept}-prefill-0", f"{kept}-decode-0"}
    firsts = [done.attempts[0] for done in found]
    on_kept = [
        done for done, first in zip(found, firsts, strict=True) if {first.prefill_worker, first.decode_worker} == own
    ]
    assert 0 < len(on_kept) < len(found), "the other streams used the lost node"
    assert all(len(done.attempts) == 1 for done in on_kept), "streams of the surviving host are not disturbed"
    assert any(len(done.attempts) > 1 for done in found), "the kill hit no stream"
    after = wait_ready(nodes, lambda groups: groups[lost].get("node") == LINK[0])
    show("the replicas of the killed node are ready on the other", killed)
    assert after[kept]["pids"] == before[kept]["pids"]
    found = await Traffic(nodes, oracle, seed=86).run()
    assert {attempt.decode_worker for done in found for attempt in done.attempts} >= {f"{lost}-decode-0"}


def test_down_ends_every_process(nodes: RayNodes) -> None:
    pids = [pid for group in nodes.groups().values() for pid in group["pids"].values()]
    assert len(pids) == 7
    nodes.looseleaf("down")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    gone = nodes.run("status")
    assert gone.returncode == 1 and "no deployment 'looseleaf' in this Ray cluster; there are none" in gone.stderr


async def test_serve_on_ray_with_two_ranks_waits_for_a_node_if_the_spread_is_strict(
    nodes: RayNodes, checkpoint: Path
) -> None:
    nodes.run("down")  # unless the tests above have run
    if not nodes.pids(1):
        nodes.start_node(1)
    flags = [
        "--hosts", "2", "--prefill", "2", "--decode", "2", "--tensor-parallel-size", "2", "--spread", "strict",
        "--spare", "0", "--host", "0.0.0.0", "--port", "0", "--grpc-port", "0", "--num-blocks", "1024",
        "--max-model-len", "1024",
    ]  # fmt: skip
    with nodes.begin("serve", "--ray", str(checkpoint), *flags) as served:
        assert served.stdout is not None
        lines = [served.stdout.readline() for _ in range(4)]
        assert lines[-1].startswith("  says  Once upon a time"), lines
        groups = nodes.groups()
        lost = on_node(groups, 1)
        assert groups[lost]["plan"] == {"index": groups[lost]["plan"]["index"], "cpus": 4, "prefill": 1, "decode": 1}
        oracle = oracle_of(checkpoint, 4)
        await Traffic(nodes, oracle, seed=88).run(lambda: nodes.kill_node(1))
        waits = "waiting for a node with 4 free CPUs"
        wait_for(nodes.groups, lambda groups: groups[lost]["state"] == waits, BACK_S, "not waiting")
        nodes.start_node(1)
        after = wait_ready(nodes, lambda groups: groups[lost].get("node") == LINK[1])
        assert after[on_node(after, 0)]["pids"] == groups[on_node(groups, 0)]["pids"]
        await Traffic(nodes, oracle, seed=89).run()
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0
    assert nodes.run("status").returncode == 1
