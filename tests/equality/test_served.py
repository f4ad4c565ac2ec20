"""The built-in model through real services: in one chunk and in several, cached, swapped, given back, with a killed
decode worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from bench.served.server import Request, WatchedServer, send_all
from common.group_need import floor_of
from common.types import StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from engine.ranks.leader import BEAT_S, SILENT_BEATS
from engine.tiny import VOCAB_SIZE, make_checkpoint
from looseleaf import LLM, AsyncClient
from looseleaf.metrics_page import read, total
from looseleaf.results import Completion, Delta, join
from looseleaf.serve.model_source import BUILT_IN, gguf_directory
from testing.against_transformers import by_transformers
from testing.equality.cases import KINDS, TOLERANCE, Answer, Case, answer_of, differences, expect, make_cases
from testing.first_layers import first_layers
from testing.gguf_files import make_gguf
from testing.oracle import Oracle
from testing.quantized import FORMATS, make_quantized
from testing.ranks import followers_of
from testing.system import assert_nothing_held, wait_for
from testing.zoo import ZOO, make_foreign

FOREIGN = ("deepseek-v3", "gemma3", "bamba")
MORE_FOREIGN = (
    "falcon-h1", "gemma2", "glm4", "gpt-oss", "mamba2", "mixtral", "phi3", "qwen3-moe", "qwen3-next"
)  # fmt: skip
"""Families that only `make families` runs, because each takes about 20 s."""
MAX_MODEL_LEN = 176
TIGHT = {"num_blocks": 48, "max_model_len": MAX_MODEL_LEN}
"""Settings with half of the blocks that all requests need together. Each request fits into decode's floor."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(2048)


@pytest.fixture(scope="module")
def expected(cases: list[Case]) -> list[Answer]:
    settings = RunnerSettings(BUILT_IN, num_threads=1, max_model_len=MAX_MODEL_LEN, deterministic=True)
    oracle = Oracle(ModelRunner(settings))
    return [expect(oracle, case) for case in cases]


def check(cases: list[Case], expected: list[Answer], found: list[Completion]) -> None:
    wrong = differences(cases, expected, [answer_of(done) for done in found])
    assert not wrong, "\n".join(wrong)


async def answers(address: str, cases: list[Case]) -> list[Completion]:
    return await send_all(address, [Request(case.prompt, case.options) for case in cases], len(cases))


async def streamed(address: str, cases: list[Case], flowing: Callable[[], None]) -> list[Completion]:
    """Runs all cases at once. Calls `flowing` when the first request has received a token from decode."""

    async def one(client: AsyncClient, case: Case) -> Completion:
        deltas: list[Delta] = []
        num_tokens = 0
        async for delta in client.stream(case.prompt, **case.options):
            deltas.append(delta)
            before, num_tokens = num_tokens, num_tokens + len(delta.token_ids)
            if case is cases[0] and before < 2 <= num_tokens:
                flowing()
        return join(deltas)

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, case) for case in cases))


async def replaced(llm: LLM, pid: int) -> None:
    """Waits until the decode worker is another process than `pid`."""
    while llm.pids["decode"] == pid:
        await asyncio.sleep(0.05)


async def killed_midway(llm: LLM, cases: list[Case], expected: list[Answer]) -> None:
    """Kills the decode worker in the middle of a stream."""
    await lost_midway(llm, cases, expected, lambda worker: worker, signal.SIGKILL)


async def lost_midway(
    llm: LLM, cases: list[Case], expected: list[Answer], part: Callable[[int], int], how: signal.Signals
) -> int:
    """Runs all cases. During the first one, sends a signal to `part(pid)`, a process of the decode worker `pid`, whose
    loss is the loss of the worker. Repeats this until requests have come back to prefill: on a busy machine, the worker
    may have sent all tokens when the signal arrives. Returns the process that got the last signal.
    """
    lost: list[int] = []

    def lose() -> None:
        lost.append(part(llm.pids["decode"]))
        os.kill(lost[-1], how)

    for _ in range(5):
        sent, pid = llm.requests_by_worker().get("prefill", 0), llm.pids["decode"]
        check(cases, expected, await streamed(llm.addresses.grpc, cases, lose))
        await replaced(llm, pid)
        if llm.requests_by_worker()["prefill"] > sent + len(cases):
            return lost[-1]
    pytest.fail("no request came back")


async def test_served_cold_cached_and_with_decode_killed_midway(
    cases: list[Case], expected: list[Answer], tmp_path: Path
) -> None:
    """With a draft model, whose drafts are verified in some steps. A worker that takes over loads it again."""
    draft = first_layers(BUILT_IN, tmp_path / "draft", 1)
    config = json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3})
    with LLM(max_model_len=MAX_MODEL_LEN, num_blocks=1024, roles="split", speculative_config=config) as llm:
        check(cases, expected, await answers(llm.addresses.grpc, cases))
        again = await answers(llm.addresses.grpc, cases)
        check(cases, expected, again)
        assert all(done.usage.cached_tokens >= 16 for done in again)
        sent = llm.requests_by_worker()["prefill"]
        assert sent == 2 * len(cases), "one prefill each, whatever their number of samples"
        wait_for(lambda: num_drafts(llm), bool, 10, "no draft was verified")
        await killed_midway(llm, cases, expected)
        check(cases, expected, await answers(llm.addresses.grpc, cases))
        wait_for(lambda: num_drafts(llm), bool, 10, "the successor verifies no draft")
        assert_nothing_held(llm.addresses.block_store)


def num_drafts(llm: LLM) -> float:
    """Returns the number of drafts that the current decode worker has verified, according to its last report."""
    return total(read(llm.addresses.http), "looseleaf_spec_decode_num_drafts_total")


@pytest.fixture(scope="module")
def expected_in_parts(cases: list[Case]) -> list[Answer]:
    how: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "device": "cpu", "reduction_parts": 4}
    oracle = Oracle(ModelRunner(RunnerSettings(BUILT_IN, num_threads=1, **how)))
    return [expect(oracle, case) for case in cases]


@pytest.mark.parametrize(("size", "stages"), [(4, 1), (2, 2)])
async def test_served_with_prefill_on_two_ranks_and_decode_on_four(size: int, stages: int, tmp_path: Path) -> None:
    """Blocks are handed over, and found again, between workers with different ranks. The KV heads of the built-in model
    cannot be divided among four ranks.
    """
    make_checkpoint(tmp_path, std=0.1, num_attention_heads=8, num_key_value_heads=4)
    how: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "reduction_parts": 4}
    oracle = Oracle(ModelRunner(RunnerSettings(tmp_path, num_threads=1, device="cpu", **how)))
    cases = make_cases(VOCAB_SIZE)
    expected = [expect(oracle, case) for case in cases]
    with LLM(
        str(tmp_path),
        num_blocks=1024,
        roles="split",
        prefill_tensor_parallel_size=2,
        decode_tensor_parallel_size=size,
        decode_pipeline_parallel_size=stages,
        **how,
    ) as llm:
        assert [len(followers_of(llm.pids[name])) for name in ("prefill", "decode")] == [1, 3]
        check(cases, expected, await answers(llm.addresses.grpc, cases))
        again = await answers(llm.addresses.grpc, cases)
        check(cases, expected, again)
        assert all(done.usage.cached_tokens >= 16 for done in again)
        assert_nothing_held(llm.addresses.block_store)


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
async def test_served_with_a_rank_of_decode_killed_and_then_frozen_midway(
    kind: str, cases: list[Case], request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefill has a single rank. The first rank of decode finds a frozen rank by its missing beats (`test_ranks` tests
    how many), long before the gateway would find that the worker has made no step.
    """
    expected = request.getfixturevalue("expected_in_parts" if kind == "tensor" else "expected")
    how: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "num_blocks": 1024, f"decode_{kind}_parallel_size": 2}
    with LLM(verbose=True, roles="split", **how) as llm:
        killed = await lost_midway(llm, cases, expected, only_follower, signal.SIGKILL)
        frozen = await lost_midway(llm, cases, expected, only_follower, signal.SIGSTOP)
        assert_nothing_held(llm.addresses.block_store)
    log = capsys.readouterr().err
    assert f"rank 1 (process {frozen}) is frozen: no beat for {SILENT_BEATS * BEAT_S:.0f} s" in log
    assert f"(process {killed}) is frozen" not in log and "has made no step" not in log


def only_follower(worker: int) -> int:
    """Returns the process of the second of a worker's two ranks."""
    [follower] = followers_of(worker)
    return follower


async def answered_until(
    server: WatchedServer, cases: list[Case], expected: list[Answer], preempted: Callable[[], bool]
) -> None:
    """Runs all cases repeatedly. Prompts are cached in later rounds, so more requests decode at once."""
    for _ in range(4):
        check(cases, expected, await answers(server.addresses.grpc, cases))
        if preempted():
            return


async def test_served_in_chunks_of_16_and_preempted_by_swap(cases: list[Case], expected: list[Answer]) -> None:
    with WatchedServer(None, TIGHT | {"max_num_batched_tokens": 16}, {"PREEMPTION": "swap"}) as server:
        await answered_until(server, cases, expected, lambda: server.steps()[-1].preemption["swapped_groups"] > 0)
        counts = server.steps()[-1].preemption
        assert counts["swapped_groups"] == counts["resumed_groups"] > 0 and counts["given_back_groups"] == 0
        assert_nothing_held(server.addresses.block_store)


async def test_served_in_chunks_of_64_and_preempted_by_giving_back(cases: list[Case], expected: list[Answer]) -> None:
    with WatchedServer(None, TIGHT | {"max_num_batched_tokens": 64}, {"PREEMPTION": "give-back"}) as server:
        preempted = lambda: server.metric("looseleaf_requests_given_back_total") > 0  # noqa: E731
        await answered_until(server, cases, expected, preempted)
        assert preempted()
        assert server.steps()[-1].preemption["swapped_groups"] == 0
        assert_nothing_held(server.addresses.block_store)


@pytest.mark.parametrize("name", [*FOREIGN, *(pytest.param(name, marks=pytest.mark.families) for name in MORE_FOREIGN)])
async def test_a_model_of_transformers_served_swapped_and_with_decode_killed_midway(name: str, tmp_path: Path) -> None:
    """The model runs in fp32, so that greedy tokens can be compared with transformers, too."""
    model, cases = make_foreign(tmp_path, ZOO[name]), make_cases(512)
    expected = await served_swapped_and_killed(model, cases, dtype="float32")
    greedy = [pair for pair in zip(cases, expected, strict=True) if pair[0].sampling == KINDS["greedy"]]
    assert sum(len(text.token_ids) for _, [text] in greedy) > 16
    for case, [text] in greedy:
        logits = by_transformers(model, [*case.prompt, *text.token_ids])[len(case.prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == text.token_ids
        best = logits.log_softmax(-1).amax(-1).tolist()
        assert best == pytest.approx([each.logprob for each in text.logprobs], abs=TOLERANCE)


async def test_a_window_is_served_at_full_length_in_the_smallest_arena(tmp_path: Path) -> None:
    """Two prompts and answers of full length go through prefill one after the other, in an arena of two floors."""
    animal, length, step = ZOO["gemma3"], 1024, 64
    animal = replace(animal, changes=animal.changes | {"sliding_window": 64, "max_position_embeddings": length})
    model = make_foreign(tmp_path, animal, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"max_model_len": length, "block_size": 16}
    runner = ModelRunner(RunnerSettings(model, num_threads=1, device="cpu", **settings))
    rules = runner.layout.rules(step)
    floors = [floor_of(role, length, rules) for role in ("prefill", "decode")]
    assert sum(floors) < len(rules.groups) * length // 16, "as before, not even one sequence would fit"
    cases = [
        Case(str(first), tuple(first + i % 97 for i in range(length - 24)), KINDS["greedy"], StoppingParams(24, 24))
        for first in (10, 200)
    ]
    expected = [expect(Oracle(runner), case) for case in cases]
    settings |= {"num_blocks": sum(floors), "max_num_batched_tokens": step}
    with LLM(str(model), roles="split", **settings) as llm:
        check(cases, expected, await answers(llm.addresses.grpc, cases))
        assert_nothing_held(llm.addresses.block_store)


@pytest.mark.parametrize("how", ["awq", "int4", "gguf"])
async def test_quantized_weights_served_swapped_and_with_decode_killed_midway(how: str, tmp_path: Path) -> None:
    """The models are a 4-bit checkpoint, the built-in model rounded at load, and a GGUF file with several
    weight types.
    """
    model, vocab_size, settings = tmp_path / "model", 512, dict[str, Any]()
    if how == "gguf":
        mixed = {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "blk": Type.Q4_K}
        make_gguf(tmp_path / "a.gguf", tmp_path / "twin", "llama", mixed)
        model = gguf_directory(tmp_path / "a.gguf", tmp_path)
    elif how == "awq":
        make_quantized(model, tmp_path / "twin", FORMATS[how], "qwen2", seed=1)
    else:
        model, vocab_size, settings = BUILT_IN, 2048, {"quantization": how}
    await served_swapped_and_killed(model, make_cases(vocab_size), **settings)


async def served_swapped_and_killed(model: Path, cases: list[Case], **settings: Any) -> list[Answer]:
    """Serves the cases with swaps, then with a kill. Returns the answers, which must be those of a single process."""
    settings = {"block_size": 16} | settings
    how = RunnerSettings(model, num_threads=1, max_model_len=MAX_MODEL_LEN, deterministic=True, **settings)
    runner = ModelRunner(how)
    oracle, groups = Oracle(runner), len(runner.layout.groups)
    expected = [expect(oracle, case) for case in cases]
    longest = max(range(len(cases)), key=lambda i: min(len(text.token_ids) for text in expected[i]))
    for those in (cases, expected):  # decode is killed during the first one
        those.insert(0, those.pop(longest))  # type: ignore[attr-defined]
    tight = TIGHT | {"num_blocks": TIGHT["num_blocks"] * groups}
    with WatchedServer(str(model), tight | settings, {"PREEMPTION": "swap"}) as server:
        swapped = lambda: server.steps()[-1].preemption["swapped_groups"] > 0  # noqa: E731
        await answered_until(server, 3 * cases, 3 * expected, swapped)
        counts = server.steps()[-1].preemption
        assert counts["swapped_groups"] == counts["resumed_groups"] > 0
        assert_nothing_held(server.addresses.block_store)
    with LLM(str(model), max_model_len=MAX_MODEL_LEN, num_blocks=1024 * groups, roles="split", **settings) as llm:
        await killed_midway(llm, cases, expected)
        assert_nothing_held(llm.addresses.block_store)
    return expected
