"""`LLM`, `Client` and `AsyncClient` against real services."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import looseleaf
from common.errors import DeadlineExceeded, InvalidArgument, StartupError, Unavailable
from common.types import FinishReason
from looseleaf import LLM, AsyncClient, Client
from looseleaf.cli import main
from looseleaf.options import GenerateOptions
from looseleaf.results import join
from testing.system import assert_nothing_held

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=1024) as running:
        yield running


@pytest.fixture
def client(llm: LLM) -> Client:
    return llm.client


def test_a_stream_amounts_to_the_completion(client: Client) -> None:
    whole = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)
    deltas = list(client.generate(PROMPT, stream=True, max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2))
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert whole.finish_reason is deltas[-1].finish_reason is FinishReason.LENGTH
    assert [item.token_id for item in whole.logprobs] == list(whole.token_ids)
    assert all(len(item.top) == 2 for item in whole.logprobs)


def test_usage_adds_up_and_timings_are_there(client: Client) -> None:
    done = client.generate(PROMPT, max_tokens=4, ignore_eos=True)
    usage = done.usage
    assert usage.cached_tokens + usage.computed_tokens + usage.transferred_tokens == usage.prompt_tokens
    assert usage.completion_tokens == len(done.token_ids) == 4
    assert done.timings.prefill_ns > 0 and done.timings.decode_ns > 0


def test_token_ids_text_and_chat_are_the_same_prompt(client: Client) -> None:
    ids = client.tokenize(PROMPT)
    greedy = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    assert client.generate(ids, **greedy).token_ids == client.generate(PROMPT, **greedy).token_ids  # type: ignore[arg-type]
    turns = [{"role": "user", "content": "hi"}]
    expected = client.generate(client.tokenize(turns), **greedy).token_ids  # type: ignore[arg-type]
    assert client.chat("hi", **greedy).token_ids == expected  # type: ignore[arg-type]
    assert client.chat(turns, **greedy).token_ids == expected  # type: ignore[arg-type]
    assert client.detokenize(client.tokenize("the wolf", add_special_tokens=False)) == "the wolf"


def test_models(client: Client) -> None:
    (model,) = client.models()
    assert model.vocab_size > 0 and model.max_model_len > 0
    assert client.generate(PROMPT, model=model.id, max_tokens=1).token_ids


def test_many_prompts_in_their_order(llm: LLM) -> None:
    prompts = [f"number {number}" for number in range(100)]
    done = llm.generate(prompts, max_tokens=4, temperature=0.0, ignore_eos=True)
    for prompt, completion in list(zip(prompts, done, strict=True))[::25]:
        alone = llm.client.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
        assert alone.token_ids == completion.token_ids
    assert llm.generate([]) == []
    assert len(llm.generate("one", max_tokens=1)) == len(llm.generate([5, 6, 7], max_tokens=1)) == 1


def test_an_interrupted_or_failed_batch_is_cancelled(llm: LLM) -> None:
    options: GenerateOptions = {"max_tokens": 900, "ignore_eos": True}
    began = time.monotonic()
    llm.generate(PROMPT, **options)
    alone_s = time.monotonic() - began
    main_thread = threading.main_thread().ident
    gc.collect()  # an interrupt in a finalizer of an earlier test's objects would be swallowed
    threading.Timer(alone_s / 4, signal.pthread_kill, [main_thread, signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 256, **options)
    with pytest.raises(InvalidArgument, match="empty"):
        llm.generate(["", *[PROMPT] * 255], **options)
    assert time.monotonic() - began < alone_s + 1.0
    assert_nothing_held(llm.addresses.block_store)


def test_samples_of_one_prompt(client: Client) -> None:
    options: GenerateOptions = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    done = client.generate(PROMPT, n=3, logprobs=0, **options)
    alone = client.generate(PROMPT, **options)
    assert len({sample.token_ids for sample in done.samples}) == 3
    assert (done.text, done.token_ids) == (done.samples[0].text, done.samples[0].token_ids)
    assert done.token_ids == alone.token_ids and len(alone.samples) == 1
    assert all(len(sample.logprobs) == 12 and sample.beam_score is None for sample in done.samples)
    assert done.usage.completion_tokens == 36 and done.usage.prompt_tokens == alone.usage.prompt_tokens


def test_streamed_samples_amount_to_the_same(client: Client) -> None:
    options: GenerateOptions = {"n": 3, "max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    deltas = list(client.generate(PROMPT, stream=True, **options))
    assert {delta.index for delta in deltas} == {0, 1, 2}
    assert sum(delta.finish_reason is not None for delta in deltas) == 3
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert join(deltas).samples == client.generate(PROMPT, **options).samples


def test_beams_come_best_first(client: Client) -> None:
    done = client.generate(PROMPT, beam_width=4, n=3, length_penalty=0.5, early_stopping="never", max_tokens=8)
    scores = [sample.beam_score for sample in done.samples]
    assert len(scores) == 3 and None not in scores and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert done.beam_score == scores[0]
    assert len(client.generate(PROMPT, beam_width=2, max_tokens=4).samples) == 2


def test_samples_on_the_command_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--address", llm.addresses.grpc, "--max-tokens", "8", "--seed", "3"]
    assert main(["complete", PROMPT, "-n", "2", "--temperature", "1", *flags]) == 0
    first, second = llm.client.generate(PROMPT, n=2, temperature=1.0, max_tokens=8, seed=3).samples
    assert capsys.readouterr().out == f"[0] {first.text}\n[1] {second.text}\n"
    assert main(["complete", PROMPT, "--beam-width", "2", "--early-stopping", "never", *flags]) == 0
    scored = capsys.readouterr().out
    assert scored.startswith("[0] (score -") and "\n[1] (score -" in scored
    assert main(["complete", PROMPT, "--beam-width", "2", "-n", "1", "--early-stopping", "never", *flags]) == 0
    assert capsys.readouterr().out == scored.partition("\n[1]")[0].partition(") ")[2] + "\n"


def test_a_stream_that_is_left_is_cancelled(llm: LLM) -> None:
    for delta in llm.client.generate(PROMPT, stream=True, max_tokens=900, ignore_eos=True):
        assert delta.finish_reason is None
        break
    assert_nothing_held(llm.addresses.block_store)


def test_an_option_that_is_none_is_not_given(llm: LLM) -> None:
    options: Any = dict.fromkeys(("n", "beam_width", "timeout", "stop", "logit_bias", "temperature"))
    assert len(llm.generate(PROMPT, **options, max_tokens=2)[0].samples) == 1
    assert not llm.client.generate(PROMPT, **options, max_tokens=2, logprobs=None).logprobs
    with Client(llm.addresses.grpc, timeout=0.05) as client, pytest.raises(DeadlineExceeded):
        client.generate(PROMPT, **options, max_tokens=900, ignore_eos=True)


def test_refusals_are_our_errors(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.generate(PROMPT, top_p=3.0)
    assert [violation.field for violation in caught.value.violations] == ["top_p"]
    with pytest.raises(TypeError, match="max_token'"):
        client.generate(PROMPT, max_token=3)  # type: ignore[call-overload]
    with pytest.raises(DeadlineExceeded):
        client.generate(PROMPT, max_tokens=900, ignore_eos=True, timeout=0.05)


def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as nobody, pytest.raises(Unavailable, match=r"nothing answers at 127\.0\.0\.1:1"):
        nobody.generate(PROMPT)


async def test_the_async_client(llm: LLM, client: Client) -> None:
    async with AsyncClient(llm.addresses.grpc) as opened:
        expected = client.generate(PROMPT, max_tokens=8, temperature=0.0)
        many = await asyncio.gather(*(opened.generate(PROMPT, max_tokens=8, temperature=0.0) for _ in range(8)))
        assert {done.token_ids for done in many} == {expected.token_ids}
        deltas = [delta async for delta in opened.stream(PROMPT, max_tokens=8, temperature=0.0)]
        assert "".join(delta.text for delta in deltas) == expected.text
        assert await opened.detokenize(await opened.tokenize("a b", add_special_tokens=False)) == "a b"
        assert await opened.models() == client.models()
        assert (await opened.chat("hi", max_tokens=2)).token_ids
        with pytest.raises(TypeError, match="temprature"):
            await opened.generate(PROMPT, temprature=1.0)  # type: ignore[call-arg]


def test_an_api_key_is_asked_for_and_tenants_share_no_blocks(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("zoo zoo-key\n")
    with LLM(num_blocks=512, api_key="secret-key", api_key_file=str(keys)) as locked:
        ids = list(range(300, 340))
        with Client(locked.addresses.grpc, api_key="zoo-key") as zoo:
            cached = [c.generate(ids, max_tokens=1).usage.cached_tokens for c in (locked.client, zoo, zoo)]
        assert cached == [0, 0, 32]
        with Client(locked.addresses.grpc) as stranger, pytest.raises(looseleaf.LooseleafError) as caught:
            stranger.generate(PROMPT, max_tokens=1)
        assert caught.value.http_status == 401


def test_settings_of_llm() -> None:
    with pytest.raises(TypeError, match="unknown setting 'prefil'"):
        LLM(prefil=2)
    with pytest.raises(StartupError, match="prefill"):
        LLM(prefill=0)


def test_an_interpreter_that_ends_takes_its_services_along(tmp_path: Path) -> None:
    source = "from looseleaf import LLM; llm = LLM(num_blocks=512, roles='split'); print(*llm.pids.values())"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    pids = done.stdout.split()
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_importing_is_quick_and_light() -> None:
    source = "import sys, looseleaf; looseleaf.Client; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert not {"torch", "redis", "transformers", "pydantic_settings"} & set(done.stdout.split())
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0, "seconds of CPU time"
