"""Embeddings and scores over real workers: every interface returns the same bits, in any batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

from looseleaf import LLM

TEXTS = [f"the miller of number {index} " * (1 + 7 * index) for index in range(12)]


def test_every_interface_gives_the_same_bits_beside_other_requests(llm: LLM) -> None:
    url = f"http://{llm.addresses.http}"
    alone = [llm.client.embed(text) for text in TEXTS]
    assert {len(found.embedding) for found in alone} == {64} and alone[0].usage.handed_over_tokens == 0
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with ThreadPoolExecutor(8) as pool:
        tales = [pool.submit(llm.client.generate, text, max_tokens=40, temperature=0.0) for text in TEXTS]
        lists = [pool.submit(client.embeddings.create, model="", input=TEXTS) for _ in range(3)]
        for found in lists:
            data = found.result().data
            assert [tuple(item.embedding) for item in data] == [known.embedding for known in alone]
        assert all(tale.result().text for tale in tales)
    body = {"text_1": TEXTS[3], "text_2": TEXTS}
    scores = [item["score"] for item in httpx.post(f"{url}/score", json=body, timeout=60).json()["data"]]
    assert max(scores) == scores[3] and abs(scores[3] - 1) < 1e-6


def test_a_cached_prefix_gives_the_same_embedding(llm: LLM) -> None:
    first, second = (llm.client.embed("a tale that is told again " * 20) for _ in range(2))
    assert first.usage.cached_tokens == 0 and second.usage.cached_tokens > 16
    assert first.embedding == second.embedding
