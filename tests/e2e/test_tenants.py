"""Tenants share no blocks of any worker, and each tenant finds its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from looseleaf import LLM, Client
from testing.system import prompts

BLOCK = 16
KEYS = {"acme": "a-key-of-acme", "zoo": "a-key-of-zoo", "bulk": "a-key-of-bulk"}
QUOTA = 10


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{tenant} {key}\n" for tenant, key in KEYS.items()]
    keys.write_text("".join([*lines, f"bulk another cache_percent={QUOTA}\n"]))
    settings = {"num_blocks": 512, "max_model_len": 1024, "roles": "split", "api_key_file": str(keys)}
    with LLM(str(checkpoint), **settings) as running:  # type: ignore[arg-type]
        yield running


@pytest.fixture
def clients(served: LLM) -> dict[str, Client]:
    return {tenant: Client(served.addresses.grpc, api_key=key) for tenant, key in KEYS.items()}


@pytest.mark.parametrize("num_samples", [1, 3])
def test_what_decode_has_published_is_a_hit_for_its_tenant_alone(clients: dict[str, Client], num_samples: int) -> None:
    """In the second turn of a chat, decode has filled and published most of the blocks."""
    [prompt] = prompts(1, seed=20 + num_samples, lengths=(50, 50))
    acme, zoo = clients["acme"], clients["zoo"]
    asked = {"max_tokens": 60, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    first = acme.generate(prompt, n=num_samples, **asked)  # type: ignore[arg-type]
    filled = (50 + 60 - 1) // BLOCK * BLOCK
    for sample in first.samples:
        turn = [*prompt, *sample.token_ids, 11, 12, 13]
        other = zoo.generate(turn, max_tokens=1)
        shared = 0 if sample is first.samples[0] else 50 // BLOCK * BLOCK  # of its own earlier turn
        assert other.usage.cached_tokens == shared
        own = acme.generate(turn, max_tokens=1)
        assert own.usage.cached_tokens == filled
    again = zoo.generate(prompt, n=num_samples, **asked)  # type: ignore[arg-type]
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in first.samples], "other blocks, same tokens"


def test_a_prompt_is_a_hit_for_its_tenant_alone(clients: dict[str, Client]) -> None:
    [prompt] = prompts(1, seed=30, lengths=(90, 90))
    for client in (clients["acme"], clients["zoo"]):
        assert client.generate(prompt, max_tokens=1).usage.cached_tokens == 0
        assert client.generate(prompt, max_tokens=1).usage.cached_tokens == 80


def test_a_flood_evicts_what_is_beyond_its_own_quota(served: LLM, clients: dict[str, Client]) -> None:
    """The tenant's prompts and outputs exceed the arena. Without a quota, the same flood evicts all blocks of
    others."""
    [mine] = prompts(1, seed=40, lengths=(90, 90))
    flood = prompts(60, seed=41, lengths=(100, 100))
    for tenant, left in (("bulk", 80), ("zoo", 0)):
        clients["acme"].generate(mine, max_tokens=1)
        for prompt in flood:
            clients[tenant].generate(prompt, max_tokens=60, ignore_eos=True)
        assert clients["acme"].generate(mine, max_tokens=1).usage.cached_tokens == left, tenant
    cached = [clients["zoo"].generate(prompt, max_tokens=1).usage.cached_tokens for prompt in reversed(flood)]
    assert sum(cached) > QUOTA / 100 * 512 * BLOCK


def test_a_tenant_finds_no_more_than_its_quota(clients: dict[str, Client]) -> None:
    asked = prompts(20, seed=42, lengths=(100, 100))
    for prompt in asked:
        clients["bulk"].generate(prompt, max_tokens=1)
    cached = [clients["bulk"].generate(prompt, max_tokens=1).usage.cached_tokens for prompt in reversed(asked)]
    assert 0 < sum(cached) <= QUOTA / 100 * 512 * BLOCK
