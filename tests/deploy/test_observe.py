"""The dashboard and the rules in deploy/observe, in Debian's Prometheus, which scrapes a real server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.metrics import Metrics
from looseleaf import LLM, metrics_page
from testing.chaos.stack import free_ports
from testing.system import wait_for
from tests.third_party.conftest import STORYTELLER
from tests.third_party.install import CLIENTS, NotInstalled, install
from tools import dashboard

OBSERVE = Path(__file__).resolve().parents[2] / "deploy" / "observe"
QUERIES = sorted({query.expression for panel in dashboard.panels() for query in panel.queries})
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"] for rule in group["rules"]
]


@pytest.fixture(scope="module")
def programs() -> Path:
    """The directory with prometheus and promtool."""
    [client] = [client for client in CLIENTS if client.name == "promtool"]
    try:
        install(client)
    except NotInstalled as reason:
        pytest.skip(f"Debian's prometheus is not available: {reason}")
    return client.directory / "usr" / "bin"


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus with our rules."""

    url: str

    def series(self, query: str) -> list[dict[str, Any]]:
        """Returns the series of an expression whose value is a number."""
        reply = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=60).json()
        assert reply["status"] == "success", (query, reply)
        return [series for series in reply["data"]["result"] if series["value"][1] != "NaN"]


@pytest.fixture(scope="module")
def served() -> Iterator[LLM]:
    with LLM(str(STORYTELLER), roles="split", num_blocks=512) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(programs: Path, served: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(OBSERVE / "rules.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [served.addresses.http]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    process = subprocess.Popen(
        [
            programs / "prometheus", f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data", f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL, stderr=(directory / "log").open("w"),
    )  # fmt: skip
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def test_the_dashboard_is_generated_from_its_source() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "run python -m tools.dashboard"


def test_every_metric_in_a_query_or_a_rule_exists() -> None:
    names = {line.split()[2] for line in Metrics("m").render().decode().splitlines() if line.startswith("# TYPE")}
    texts = [*QUERIES, *(rule["expr"] for rule in RULES)]
    used = {name for text in texts for name in re.findall(r"\blooseleaf_\w+", text)}
    suffixes = ("", "_bucket", "_sum", "_count")
    unknown = {name for name in used if not any(name.removesuffix(suffix) in names for suffix in suffixes)}
    assert len(used) > 25 and not unknown


@pytest.mark.parametrize("command", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")], ids=str)
def test_the_rules_are_valid_and_every_alert_fires_for_its_fault_alone(
    programs: Path, command: tuple[str, ...]
) -> None:
    done = subprocess.run([programs / "promtool", *command], cwd=OBSERVE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((OBSERVE / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    firing = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert firing == silent == {rule["alert"] for rule in RULES if "alert" in rule}


def test_every_query_and_every_objective_has_data_in_a_live_run(served: LLM, prometheus: Prometheus) -> None:
    _lose_a_decode_worker(served)
    records = [rule["record"] for rule in RULES if "record" in rule]
    happened = [query for query in QUERIES if "looseleaf_fallbacks" not in query]  # no fallback happens in this run
    queries = [query.replace("$__rate_interval", "1m").replace("$model", ".+") for query in happened]

    def without_data() -> list[str]:
        served.generate(["Once upon a time", "The wolf"], max_tokens=8)
        return [query for query in [*queries, *records] if not prometheus.series(query)]

    wait_for(without_data, lambda missing: not missing, 60.0, "no data")


def _lose_a_decode_worker(served: LLM) -> None:
    """Kills the decode worker in the middle of a story, so that an attempt is lost. On a busy machine, decode may have
    sent all tokens when the kill arrives.
    """
    for _ in range(10):
        stream = served.client.generate("Once upon a time", max_tokens=200, ignore_eos=True, stream=True)
        next(iter(stream))
        os.kill(served.pids["decode"], signal.SIGKILL)
        assert sum(len(delta.token_ids) for delta in stream) > 0
        if metrics_page.total(metrics_page.read(served.addresses.http), "looseleaf_requests_retried_total") > 0:
            return
    raise AssertionError("every kill arrived after the last token")
