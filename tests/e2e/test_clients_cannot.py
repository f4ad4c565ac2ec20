"""Attacks by clients on their server: S6, S7, S8 and S16 of docs/security.md."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from looseleaf import LLM
from testing.system import assert_nothing_held

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class Canary:
    """A listener that counts connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/canary"
        self.hits = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError:
                return
            self.hits += 1  # before the client sees the connection
            connection.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def canary() -> Iterator[Canary]:
    made = Canary()
    yield made
    made.close()


def post(llm: LLM, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"http://{llm.addresses.http}/v1/{path}", json=body, headers=headers, timeout=30)


def test_urls_are_never_fetched(llm: LLM, canary: Canary) -> None:
    parts = [{"type": "image_url", "image_url": {"url": canary.url}}, {"type": "text", "text": canary.url}]
    bodies = [
        CHAT | {"messages": [{"role": "user", "content": parts}]},
        CHAT | {"messages": [{"role": "user", "content": canary.url}]},
        CHAT | {"chat_template": canary.url},
        CHAT | {"model": canary.url},
    ]
    for body in bodies:
        assert post(llm, "chat/completions", body).status_code in (200, 400, 404)
    assert post(llm, "completions", {"prompt": canary.url, "max_tokens": 2}).status_code == 200
    assert canary.hits == 0
    with pytest.raises(httpx.HTTPError):  # shows that a request is counted
        httpx.get(canary.url, timeout=60)
    assert canary.hits == 1


@pytest.mark.parametrize(
    "field", ["chat_template", "chat_template_kwargs", "mm_processor_kwargs", "documents", "tools"]
)
def test_a_template_and_what_goes_into_it_are_the_servers(llm: LLM, field: str) -> None:
    """The field is refused or ignored, but never becomes part of the prompt."""
    plain = post(llm, "chat/completions", CHAT).json()["usage"]["prompt_tokens"]
    value = (
        {"x": "y"} if field.endswith("kwargs") else "{{ 7 * 7 }}" if field == "chat_template" else [{"x": "{{ 7 }}"}]
    )
    reply = post(llm, "chat/completions", CHAT | {field: value})
    assert reply.status_code == 400 or reply.json()["usage"]["prompt_tokens"] == plain


def test_equal_request_ids_key_nothing_inside(llm: LLM) -> None:
    prompts = [[20 + i, 30 + i, 40 + i] for i in range(40)]
    alone = [llm.client.generate(prompt, max_tokens=4, temperature=0.0).token_ids for prompt in prompts]
    with ThreadPoolExecutor(40) as pool:
        ask = lambda prompt: llm.client.generate(prompt, max_tokens=4, temperature=0.0, request_id="same")  # noqa: E731
        assert [answer.token_ids for answer in pool.map(ask, prompts)] == alone
    assert_nothing_held(llm.addresses.block_store)


def test_a_tenant_in_a_header_is_nothing(llm: LLM) -> None:
    body = {"prompt": list(range(20, 90)), "max_tokens": 2}
    post(llm, "completions", body)
    again = post(llm, "completions", body, **{"x-tenant": "other", "x-user": "other", "x-salt": "other"})
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the same tenant as before"


def test_no_answer_tells_of_files_or_exceptions(llm: LLM) -> None:
    """Every error is one sentence, without a path, a class name or a line of our code."""
    strange = [
        "\x00",
        "../../etc/passwd",
        "{{ self }}",
        "%s%n",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ]
    bodies: list[dict[str, Any]] = [
        {"prompt": "a", key: value} for key in ("model", "n", "stop", "suffix") for value in strange
    ]
    bodies += [{"prompt": value} for value in ([], {}, [[]], [None], True, 1.5, [1, "a"])]
    for body in bodies:
        for path in ("completions", "chat/completions", "tokenize", "../metrics/x"):
            reply = post(llm, path, body)
            text = reply.text
            assert reply.status_code < 500 and not any(
                word in text for word in ("Traceback", 'File "', "site-packages", "Error(", "gateway/", "Exception")
            ), (body, text)
            if reply.status_code != 200 and reply.headers.get("content-type") == "application/json":
                assert json.loads(text)
