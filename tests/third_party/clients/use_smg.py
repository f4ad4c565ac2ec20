"""Tests SMG as a router in front, in both modes, over vLLM's protocol. Its answers must equal those of our own HTTP
API.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tried import MODEL, TOOLS_URL, URL, run, works

REGULAR, PREFILL, DECODE = os.environ["LOOSELEAF_VLLM_GRPC"].split()
REGULAR_2, PREFILL_2, DECODE_2 = os.environ["LOOSELEAF_TOOLS_VLLM_GRPC"].split()
DIRECTORY = os.environ["LOOSELEAF_MODEL_DIRECTORY"]
SMG = str(Path(sys.executable).with_name("smg"))
NUM_PROMPTS = 100
NUM_PREFIXES = 16
BLOCK_SIZE = 16
START_S = 60
WORDS = "once upon a time the old mill turned when the wind was strong and a wolf ran into the deep forest"
OWN = {"add_special_tokens": False}
"""Options for our own API, because SMG sends prompts of completions without BOS."""


class Router:
    """A running SMG."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._metrics_url = f"http://127.0.0.1:{port + 1}/metrics"
        command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
        self._log = Path(f"smg-{port}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen([*command, "--model-path", DIRECTORY, *arguments], stdout=log, stderr=log)

    def wait(self) -> None:
        for _ in range(START_S * 5):
            try:
                post(self.url, "/v1/completions", {"prompt": "The", "max_tokens": 1})
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError(self._log.read_text()[-3000:])

    def num_blocks_announced(self) -> int:
        """Returns the number of blocks that all workers together have announced to SMG."""
        lines = metric_lines(self._metrics_url, "smg_kv_event_blocks_total")
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if 'op="stored"' in line)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def call(url: str, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps({"model": MODEL, **body}).encode()
    return urllib.request.urlopen(
        urllib.request.Request(url + path, data, {"content-type": "application/json"}), timeout=120
    )


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    with call(url, path, body) as reply:
        return json.load(reply)


def said(reply: Any) -> list[tuple[str, str]]:
    """Returns the text and the finish reason of every choice."""
    return [(c["message"]["content"] if "message" in c else c["text"], c["finish_reason"]) for c in reply["choices"]]


def stream(url: str, body: dict[str, Any]) -> Iterator[str]:
    with call(url, "/v1/completions", {**body, "stream": True}) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield from (choice["text"] for choice in json.loads(line[6:])["choices"])


ROUTERS = {
    "regular mode": Router(26001, "--worker-urls", f"grpc://{REGULAR}", "--policy", "round_robin"),
    "P/D mode": Router(26003, "--pd-disaggregation", "--prefill", f"grpc://{PREFILL}", "--decode", f"grpc://{DECODE}"),
}


TWO_SERVERS = {
    "regular mode": Router(
        26005, "--worker-urls", f"grpc://{REGULAR}", f"grpc://{REGULAR_2}", "--policy", "cache_aware"
    ),
    "P/D mode": Router(
        26007, "--pd-disaggregation", "--prefill", f"grpc://{PREFILL}", "--decode", f"grpc://{DECODE}",
        "--prefill", f"grpc://{PREFILL_2}", "--decode", f"grpc://{DECODE_2}", "--policy", "cache_aware",
    ),
}  # fmt: skip
"""Routers that choose between two servers with the same model, each with its own cache."""


def bodies() -> list[dict[str, Any]]:
    """Returns bodies with prompts of 3 to 60 words. Every second body is sampled with a seed."""
    rng = random.Random(7)
    found = []
    for index in range(NUM_PROMPTS):
        prompt = " ".join(rng.choice(WORDS.split()) for _ in range(rng.randint(3, 60)))
        sampled = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": index}
        found.append({"prompt": prompt, "max_tokens": 32, **(sampled if index % 2 else {"temperature": 0.0})})
    return found


def same_in_both(path: str, bodies: list[dict[str, Any]], own: dict[str, Any] | None = None) -> None:
    """Checks that every answer through SMG, in both modes, equals that of our own API."""
    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda body: said(post(URL, path, {**body, **(own or {})})), bodies))
        for name, router in ROUTERS.items():
            found = list(pool.map(lambda body, url=router.url: said(post(url, path, body)), bodies))
            assert found == expected, (
                name,
                [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]][:2],
            )


@works("regular and P/D mode: SMG registers the ports and answers")
def starts() -> None:
    for router in (*ROUTERS.values(), *TWO_SERVERS.values()):
        router.wait()


@works(
    f"cache_aware between two servers, over SubscribeKvEvents: {NUM_PREFIXES} of {NUM_PREFIXES} prompts in each mode go"
    " to the server that has their prefix"
)
def cached_prefixes() -> None:
    """Prefixes reach a server through its own API. SMG can know of them only by events."""
    rng = random.Random(11)
    for mode, (name, router) in enumerate(TWO_SERVERS.items(), 1):  # in P/D mode, a server announces at two ports
        before, num_blocks, prefixes = router.num_blocks_announced(), 0, []
        for index in range(NUM_PREFIXES):
            text = " ".join(rng.choice(WORDS.split()) for _ in range(120))
            server = (URL, TOOLS_URL)[index % 2]
            reply = post(server, "/v1/completions", {"prompt": text, "max_tokens": 1, **OWN})
            prefixes.append((text, reply["usage"]["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE))
            num_blocks += prefixes[-1][1] // BLOCK_SIZE
        wait_for_blocks(router, before + mode * num_blocks)
        for text, num_cached in prefixes:
            body = {"prompt": f"{text} and then the", "max_tokens": 4, "temperature": 0.0}
            usage = post(router.url, "/v1/completions", body)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached > 0, (name, usage)


def wait_for_blocks(router: Router, number: int) -> None:
    """Waits until SMG has heard of this many blocks, and then until it hears of no more."""
    last = -1
    for _ in range(START_S * 2):
        if (now := router.num_blocks_announced()) >= number and now == last:
            return
        last = now
        time.sleep(0.5)
    raise AssertionError(f"{last} blocks of {number} were announced")


@works(
    f"{NUM_PROMPTS} prompts in each mode, greedy and sampled: the same tokens as with our own API",
    "sends prompts of completions without BOS",
)
def tokens() -> None:
    same_in_both("/v1/completions", bodies(), OWN)


@works("n=3, stop, min_tokens, ignore_eos, penalties")
def parameters() -> None:
    base = {"prompt": "Once upon a time", "max_tokens": 40}
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_p": 0.05}
    variants: list[dict[str, Any]] = [
        {"n": 3, "temperature": 1.0, "seed": 7, "top_p": 1.0},
        {"temperature": 0.0, "stop": [" who"]},
        {"temperature": 0.0, "min_tokens": 30},
        {"temperature": 0.0, "max_tokens": 200, "min_tokens": 200, "ignore_eos": True},
        {"temperature": 0.0, "max_tokens": 1},
        {"temperature": 0.7, "seed": 3, **penalties},
    ]
    same_in_both("/v1/completions", [{**base, **variant} for variant in variants], OWN)


@works("chat, with log-probabilities", "drops logit_bias, and logprobs of /v1/completions")
def chat() -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 20, "temperature": 0.0}
    same_in_both("/v1/chat/completions", [body, {**body, "n": 2, "temperature": 1.0, "seed": 2, "top_p": 1.0}])
    asked = {**body, "logprobs": True, "top_logprobs": 2}
    own, *routed = [
        [(item["token"], [top["token"] for top in item["top_logprobs"]])
         for item in post(url, "/v1/chat/completions", asked)["choices"][0]["logprobs"]["content"]]
        for url in (URL, *(router.url for router in ROUTERS.values()))
    ]  # fmt: skip
    assert all(other == own for other in routed), (own, routed)


@works("structured output: a JSON schema, a regular expression")
def structured() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    messages = [{"role": "user", "content": "Tell me a story"}]
    same_in_both("/v1/chat/completions", [{"messages": messages, "temperature": 0.0, "response_format": form}])
    for router in ROUTERS.values():
        body = {"prompt": "Yes or no?", "temperature": 0.0, "regex": "(yes|no)"}
        assert said(post(router.url, "/v1/completions", body))[0][0] in ("yes", "no")


@works("streams; a client that disconnects")
def streams() -> None:
    body = {"prompt": "The wolf", "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    expected = said(post(URL, "/v1/completions", {**body, **OWN}))[0][0]
    for router in ROUTERS.values():
        assert "".join(stream(router.url, body)) == expected
        next(leaving := stream(router.url, {**body, "max_tokens": 900}))
        leaving.close()


@works("a killed worker: a pause, then the same words")
def killed() -> None:
    body = {"prompt": "The little girl", "max_tokens": 800, "temperature": 0.0, "ignore_eos": True}
    expected = said(post(URL, "/v1/completions", {**body, **OWN}))[0][0]
    before = num_retried()
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(lambda url=router.url: "".join(stream(url, body))) for router in ROUTERS.values()]
        time.sleep(0.3)
        os.kill(int(os.environ["LOOSELEAF_WORKER_PID"]), signal.SIGKILL)
        assert [text.result() for text in found] == [expected] * len(ROUTERS)
    assert num_retried() >= before + len(ROUTERS), "the worker died before or after the answers"


def num_retried() -> float:
    lines = metric_lines(f"{URL}/metrics", "looseleaf_requests_retried_total")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def metric_lines(url: str, name: str) -> list[str]:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return [line for line in reply.read().decode().splitlines() if line.startswith(name)]


try:
    run()
finally:
    for each in (*ROUTERS.values(), *TWO_SERVERS.values()):
        each.stop()
