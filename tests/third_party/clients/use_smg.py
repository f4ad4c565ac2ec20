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

from tried import MODEL, URL, run, works

REGULAR, PREFILL, DECODE = os.environ["LOOSELEAF_VLLM_GRPC"].split()
DIRECTORY = os.environ["LOOSELEAF_MODEL_DIRECTORY"]
SMG = str(Path(sys.executable).with_name("smg"))
NUM_PROMPTS = 100
START_S = 60
WORDS = "once upon a time the old mill turned when the wind was strong and a wolf ran into the deep forest"
OWN = {"add_special_tokens": False}
"""Options for our own API, because SMG sends prompts of completions without BOS."""


class Router:
    """A running SMG."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
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
    for router in ROUTERS.values():
        router.wait()


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
    with urllib.request.urlopen(f"{URL}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("looseleaf_requests_retried_total"))


try:
    run()
finally:
    for each in ROUTERS.values():
        each.stop()
