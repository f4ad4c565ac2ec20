"""LoRA adapters through real services: PEFT's tokens, blocks kept apart, loading and unloading while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from common.adapters import CONFIG_FILE
from common.errors import ModelNotFound, NotFound, StartupError
from engine.tiny import make_checkpoint
from looseleaf import LLM, AsyncClient
from testing.adapters import ALL, make_adapter
from testing.system import assert_nothing_held, prompts, wait_for

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
BASE = "tiny"
PROMPTS = prompts(8, seed=5, lengths=(20, 90))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / BASE, std=0.1, seed=1)


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    base = model.parent
    return {
        "one": make_adapter(base / "one", model, rank=4, seed=1),
        "two": make_adapter(base / "two", model, rank=16, seed=2, targets=ALL[:4], use_rslora=True, std=0.1),
        "three": make_adapter(base / "three", model, rank=7, seed=3, rank_pattern={"q_proj": 2}),
    }


def serve(model: Path, adapters: Mapping[str, Path], **settings: Any) -> LLM:
    return LLM(
        str(model), dtype="float32", roles="split", enable_lora=True, allow_runtime_lora_updating=True,
        lora_modules=[f"{name}={path}" for name, path in adapters.items()],
        **{"num_blocks": 110, "max_model_len": 512, "preemption": "swap", **settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(model: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    """Of 110 blocks, prefill's floor takes 32, so eight sequences of 120 tokens or more do not fit: some are
    swapped.
    """
    with serve(model, adapters, max_loras=4) as running:
        yield running


def names() -> list[str]:
    """Returns the model of each prompt. Every adapter and the base model run side by side."""
    return [("one", "two", "three", BASE)[index % 4] for index in range(len(PROMPTS))]


async def run(llm: LLM, salt: str, disturb: Any = None, max_tokens: int = 40) -> list[tuple[int, ...]]:
    """Runs all prompts at once, each with its adapter. `disturb` is called when every stream has had a token."""
    begun = [asyncio.Event() for _ in PROMPTS]

    async def one(client: AsyncClient, index: int, name: str) -> tuple[int, ...]:
        tokens: list[int] = []
        options = {**GREEDY, "model": name, "cache_salt": salt, "max_tokens": max_tokens}
        async for piece in client.stream(PROMPTS[index], **options):
            tokens += piece.token_ids
            begun[index].set()
        return tuple(tokens)

    async with AsyncClient(llm.addresses.grpc) as client:
        tasks = [asyncio.create_task(one(client, index, name)) for index, name in enumerate(names())]
        if disturb is not None:
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 200)
            await asyncio.to_thread(disturb)
        return list(await asyncio.gather(*tasks))


def post(llm: LLM, what: str, **body: Any) -> httpx.Response:
    return httpx.post(f"http://{llm.addresses.http}/v1/{what}", json=body, timeout=60)


async def test_three_adapters_and_the_base_in_one_batch_give_pefts_tokens(
    llm: LLM, model: Path, adapters: dict[str, Path]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = await run(llm, "peft", max_tokens=120)
    for name, prompt, tokens in zip(names(), PROMPTS, found, strict=True):
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if name != BASE:
            reference = PeftModel.from_pretrained(reference, str(adapters[name]))
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(tokens), name


def test_an_adapter_finds_its_own_blocks_and_no_others(llm: LLM) -> None:
    prompt = prompts(1, seed=77, lengths=(80, 80))[0]
    for expected in (0, 64):
        for name in ("one", "two", "three", BASE):
            usage = llm.client.generate(prompt, model=name, max_tokens=1, temperature=0.0).usage
            assert usage.cached_tokens == expected, name


def test_samples_share_a_prefill_and_do_not_depend_on_their_number(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True, "model": "one"}
    both = llm.client.generate(PROMPTS[0], n=2, **options)
    assert both.samples[0].token_ids == llm.client.generate(PROMPTS[0], **options).token_ids
    base = llm.client.generate(PROMPTS[0], n=2, **{**options, "model": BASE})
    assert both.samples[1].token_ids != base.samples[1].token_ids


def test_models_are_listed_with_their_parent_and_answers_name_them(llm: LLM) -> None:
    listed = httpx.get(f"http://{llm.addresses.http}/v1/models", timeout=60).json()["data"]
    assert {(entry["id"], entry.get("parent")) for entry in listed} == {
        (BASE, None), ("one", BASE), ("two", BASE), ("three", BASE),
    }  # fmt: skip
    assert {(info.id, info.parent) for info in llm.client.models()} == {(e["id"], e.get("parent")) for e in listed}
    assert post(llm, "completions", model="two", prompt="Once", max_tokens=1).json()["model"] == "two"
    answer = post(llm, "completions", model="four", prompt="Once", max_tokens=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_what_cannot_be_loaded_is_refused_and_not_kept(llm: LLM, model: Path, tmp_path: Path) -> None:
    """The gateway refuses a configuration; workers refuse tensors."""
    dora = make_adapter(tmp_path / "dora", model)
    config = dora / CONFIG_FILE
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    large = make_adapter(tmp_path / "large", model, rank=17)
    for body, status, why in (
        ({"lora_name": "x", "lora_path": str(dora)}, 400, "use_dora"),
        ({"lora_name": "x", "lora_path": str(large)}, 400, "--max-lora-rank is 16"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, 400, "cannot be read"),
        ({"lora_name": "one", "lora_path": str(large)}, 400, "already loaded"),
        ({"lora_name": BASE, "lora_path": str(large)}, 400, "must differ"),
        ({"lora_name": "x y", "lora_path": str(large)}, 400, "letters"),
        ({"lora_name": "", "lora_path": "/"}, 400, "lora_name"),
    ):
        answer = post(llm, "load_lora_adapter", **body)
        assert answer.status_code == status and why in answer.json()["error"]["message"], answer.text
    assert post(llm, "unload_lora_adapter", lora_name="x").status_code == 404
    assert post(llm, "completions", model="x", prompt="Once", max_tokens=1).status_code == 404


def test_reloaded_content_never_meets_the_old_blocks_and_an_unload_waits(
    llm: LLM, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """An adapter of the same name with different content is loaded over HTTP while another one runs."""
    place, prompt = tmp_path / "late", prompts(1, seed=78, lengths=(80, 80))[0]
    options: dict[str, Any] = {**GREEDY, "model": "late", "max_tokens": 5}
    answers = []
    for source in ("one", "two"):
        shutil.copytree(adapters[source], place, dirs_exist_ok=True)
        assert post(llm, "load_lora_adapter", lora_name="late", lora_path=str(place)).status_code == 200
        answers.append(llm.client.generate(prompt, **options))
        same = llm.client.generate(prompt, **{**options, "model": source})
        assert answers[-1].token_ids == same.token_ids and same.usage.cached_tokens == 64  # the same content
        running = llm.client.generate(prompt, stream=True, **{**options, "max_tokens": 300})
        tokens = list(next(running).token_ids)
        assert post(llm, "unload_lora_adapter", lora_name="late").status_code == 200
        tokens += [token for piece in running for token in piece.token_ids]
        assert len(tokens) == 300  # the unload waited for it
        with pytest.raises((ModelNotFound, NotFound), match="late"):
            llm.client.generate(prompt, **options)
    assert answers[0].token_ids != answers[1].token_ids


async def test_killed_workers_come_back_with_their_adapters(llm: LLM, model: Path, tmp_path: Path) -> None:
    """Some adapters are loaded at startup, others over HTTP."""
    make_adapter(tmp_path, model, seed=9)
    assert post(llm, "load_lora_adapter", lora_name="late", lora_path=str(tmp_path)).status_code == 200
    options: dict[str, Any] = {**GREEDY, "model": "late", "max_tokens": 20, "cache_salt": "late"}
    late = llm.client.generate(PROMPTS[0], **options).token_ids
    expected = await run(llm, "undisturbed", max_tokens=200)
    for name in ("decode", "prefill"):
        pid = llm.pids[name]
        assert await run(llm, name, lambda p=pid: os.kill(p, signal.SIGKILL), max_tokens=200) == expected
        wait_for(lambda n=name: llm.pids[n], lambda now, old=pid: now != old, 60, "not started again")
    assert llm.client.generate(PROMPTS[0], **{**options, "cache_salt": "again"}).token_ids == late
    assert_nothing_held(llm.addresses.block_store)


async def test_requests_that_decode_gives_back_keep_their_adapters(
    llm: LLM, model: Path, adapters: dict[str, Path]
) -> None:
    """The arena has blocks for about three of eight sequences."""
    expected = await run(llm, "roomy", max_tokens=100)
    with serve(model, adapters, num_blocks=45, max_model_len=256, preemption="give-back") as small:
        assert await run(small, "tight", max_tokens=100) == expected
        page = httpx.get(f"http://{small.addresses.http}/metrics", timeout=60).text
        [count] = re.findall(r"looseleaf_requests_given_back_total\{.*\} (\S+)", page)
        assert float(count) > 0


def test_a_start_with_an_adapter_that_cannot_be_loaded_fails_with_its_reason(model: Path, tmp_path: Path) -> None:
    large = make_adapter(tmp_path, model, rank=17)
    with pytest.raises(StartupError, match="max-lora-rank is 16"):
        serve(model, {"large": large}, startup_timeout_s=120)
