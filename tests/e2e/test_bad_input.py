"""Bad input over HTTP and gRPC: the status, a message that names field and limit, and no held blocks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from common.errors import InvalidArgument, LooseleafError, NotFound
from looseleaf import LLM
from testing.system import assert_nothing_held

NAN = float("nan")
GRPC: list[tuple[dict[str, Any], type[LooseleafError], str]] = [
    ({"prompt": ""}, InvalidArgument, "text must not be empty"),
    ({"prompt": [1] * 9000}, InvalidArgument, "8192"),
    ({"prompt": [1 << 20]}, InvalidArgument, "vocab"),
    ({"prompt": "a", "model": "other"}, NotFound, "other"),
    ({"prompt": "a", "temperature": NAN}, InvalidArgument, "temperature"),
    ({"prompt": "a", "temperature": -0.1}, InvalidArgument, "temperature"),
    ({"prompt": "a", "top_p": 0.0}, InvalidArgument, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, InvalidArgument, "top_p"),
    ({"prompt": "a", "min_p": 2.0}, InvalidArgument, "min_p"),
    ({"prompt": "a", "max_tokens": 0}, InvalidArgument, "max_tokens"),
    ({"prompt": "a", "stop": [""]}, InvalidArgument, "stop"),
    ({"prompt": "a", "logprobs": 1000}, InvalidArgument, "logprobs"),
    ({"prompt": "a", "logit_bias": {1 << 20: 1.0}}, InvalidArgument, "logit_bias"),
    ({"prompt": "a", "presence_penalty": float("inf")}, InvalidArgument, "presence_penalty"),
    ({"prompt": "a", "repetition_penalty": 0.0}, InvalidArgument, "repetition_penalty"),
]


@pytest.mark.parametrize("case,kind,names", GRPC, ids=lambda value: str(value)[:40])
def test_grpc(llm: LLM, case: dict[str, Any], kind: type[LooseleafError], names: str) -> None:
    options = dict(case)
    with pytest.raises(kind) as caught:
        llm.client.generate(options.pop("prompt"), **options)
    assert names in caught.value.message
    assert "\n" not in caught.value.message
    if kind is InvalidArgument:
        assert caught.value.violations


HTTP: list[tuple[dict[str, Any] | str, int, str]] = [
    ("{not json", 400, "JSON"),
    ({"prompt": "a", "stream_options": {"temprature": 1}}, 400, "temprature"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": "a", "n": 129}, 400, "n must be at least 1 and at most 128"),
    ({"prompt": "a", "best_of": 2}, 400, "best_of must equal n"),
    ({"prompt": "a", "use_beam_search": True, "top_p": 0.5}, 400, "top_p must be 1 with a beam search"),
    ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens"),
    ({"prompt": "a", "model": "other"}, 404, "other"),
    ({"prompt": "a", "temperature": 1e300}, 400, "temperature"),
    ({}, 400, "prompt"),
]


@pytest.mark.parametrize("body,status,names", HTTP, ids=lambda value: str(value)[:40])
def test_http(llm: LLM, body: dict[str, Any] | str, status: int, names: str) -> None:
    url = f"http://{llm.addresses.http}/v1/completions"
    if isinstance(body, str):
        reply = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=60)
    else:
        reply = httpx.post(url, json=body, timeout=60)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert names in error["message"]


def test_nothing_is_held_after_refusals(llm: LLM) -> None:
    assert_nothing_held(llm.addresses.block_store)
