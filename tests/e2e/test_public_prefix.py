"""Two tenants of one service: they share only the prefixes that the operator has declared public."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from looseleaf import LLM, Client
from looseleaf.results import Completion
from testing.system import assert_nothing_held

PUBLIC = "Once upon a time there was a fox who lived beside a river with his three brothers. " * 4
SECRET = "Nobody but the old miller knew where the gold was, and he told it to no one but his cat. " * 3
BLOCK = 16


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("tenants")
    (directory / "keys").write_text("a a-key\nb b-key\n")
    (directory / "public.json").write_text(json.dumps([PUBLIC]))
    files = {"api_key_file": str(directory / "keys"), "public_prefix_file": str(directory / "public.json")}
    with LLM(num_blocks=2048, roles="split", **files) as running:
        yield running


def ask(llm: LLM, tenant: str, prompt: Any, **options: Any) -> Completion:
    with Client(llm.addresses.grpc, api_key=f"{tenant}-key") as client:
        return client.generate(prompt, temperature=0.0, ignore_eos=True, **options)


def tokenized(llm: LLM, text: str) -> list[int]:
    with Client(llm.addresses.grpc, api_key="a-key") as client:
        return list(client.tokenize(text))


def test_tenants_share_the_public_beginning_and_nothing_of_what_follows(llm: LLM) -> None:
    prompt, public = tokenized(llm, PUBLIC + SECRET), tokenized(llm, PUBLIC)
    common = next(i for i, (a, b) in enumerate(zip(prompt, [*public, -1], strict=False)) if a != b)
    shared = common // BLOCK * BLOCK
    assert 0 < shared < len(prompt) - 2 * BLOCK
    first = ask(llm, "a", prompt, max_tokens=3 * BLOCK, n=2)
    assert first.usage.cached_tokens == 0
    said = [*prompt, *first.token_ids]
    for tenant, known in (("b", shared), ("a", (len(said) - 2) // BLOCK * BLOCK)):
        again = ask(llm, tenant, said, max_tokens=4)
        assert again.usage.cached_tokens == known, f"{tenant} after what a's decode worker has published"
    assert_nothing_held(llm.addresses.block_store)


def test_the_tokens_are_the_same_with_and_without_shared_blocks(llm: LLM) -> None:
    prompt = tokenized(llm, PUBLIC + "The mouse said")
    alone = ask(llm, "a", prompt, max_tokens=40, cache_salt="alone")
    assert alone.usage.cached_tokens == 0, "a salt of its own narrows: nothing is public then"
    assert ask(llm, "b", prompt, max_tokens=40).token_ids == alone.token_ids
    after = ask(llm, "a", prompt, max_tokens=40)
    assert after.usage.cached_tokens >= BLOCK and after.token_ids == alone.token_ids
