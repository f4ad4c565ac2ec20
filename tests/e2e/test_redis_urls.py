"""Whole deployments whose Redis is given by a URL, and is lost during streams: no token changes, and no block stays
held.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from common.errors import StartupError
from common.types import SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from looseleaf import LLM
from looseleaf.commands.certs import make
from testing.oracle import Oracle
from testing.redis_sentinel import SentinelGroup
from testing.redis_tls import TlsRedis, server_has
from testing.streams import run_streams
from testing.system import assert_nothing_held, prompts

PROMPTS = prompts(8, seed=71, lengths=(5, 120))
MAX_TOKENS = 300
SAMPLING = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.1)]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.1, "max_tokens": MAX_TOKENS, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    settings = RunnerSettings(model=str(checkpoint), max_model_len=1024, num_threads=1, deterministic=True)
    oracle, stopping = Oracle(ModelRunner(settings)), StoppingParams(max_tokens=MAX_TOKENS)
    return [tuple(oracle.generate(each, SAMPLING[i % 2], stopping)) for i, each in enumerate(PROMPTS)]


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ll-urls-"))
    yield made
    shutil.rmtree(made)


needs_tls = pytest.mark.skipif(
    not server_has("tls-cert-file"), reason="this redis-server was built without TLS; Debian's has it"
)


def deployment(checkpoint: Path, url: str) -> LLM:
    return LLM(str(checkpoint), num_blocks=4096, max_model_len=1024, roles="split", redis_url=url)


async def streams(llm: LLM, salt: str, disturb: Callable[[], None] = lambda: None) -> list[tuple[int, ...]]:
    return await run_streams(llm.addresses.grpc, PROMPTS, OPTIONS, salt=salt, disturb=disturb)


@needs_tls
async def test_over_tls_with_a_password(checkpoint: Path, expected: list[tuple[int, ...]], directory: Path) -> None:
    redis = TlsRedis(directory)

    def restart() -> None:
        redis.kill()
        redis.start_empty()

    try:
        with deployment(checkpoint, redis.url) as llm:
            assert await streams(llm, "restarted", restart) == expected
            assert await streams(llm, "afterwards") == expected
            assert_nothing_held(llm.addresses.block_store)
    finally:
        redis.close()


async def test_a_killed_master_behind_a_sentinel_is_replaced_by_its_replica(
    checkpoint: Path, expected: list[tuple[int, ...]], directory: Path
) -> None:
    """The replica has a copy of the ledger, which is not used: the store builds the ledger again, as after a loss."""

    def fail_over() -> None:
        group.master.kill()
        group.wait_promoted()

    with SentinelGroup(directory) as group, deployment(checkpoint, group.url) as llm:
        pids = dict(llm.pids)
        assert await streams(llm, "failed over", fail_over) == expected
        assert await streams(llm, "afterwards") == expected
        assert_nothing_held(llm.addresses.block_store)
        assert llm.pids == pids, "a process has ended"
        [meta] = group.replica.client.keys("{looseleaf:*}:meta")
        run_id = group.replica.client.hget(meta, "run_id")
        assert run_id.decode() == group.replica.client.info("server")["run_id"]


@needs_tls
def test_a_wrong_ca_stops_the_start_with_an_error_that_names_it(checkpoint: Path, directory: Path) -> None:
    redis = TlsRedis(directory)
    (strangers := directory / "strangers").mkdir()
    make(strangers, [], timedelta(days=1))
    try:
        with pytest.raises(StartupError, match="has a certificate that was not accepted"):
            deployment(checkpoint, redis.url.replace(f"{redis.certs}/ca.pem", f"{strangers}/ca.pem"))
    finally:
        redis.close()
