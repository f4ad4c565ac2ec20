"""Long sequences, whose prompts have more blocks than one ledger call handles."""

from __future__ import annotations

from pathlib import Path

from looseleaf import LLM
from testing.system import assert_nothing_held, prompts


def test_a_prompt_of_two_thousand_blocks_is_served_and_cached(checkpoint: Path) -> None:
    [prompt] = prompts(1, seed=31, lengths=(8100, 8100))
    with LLM(str(checkpoint), block_size=4, num_blocks=8192, max_model_len=8192) as llm:
        first = llm.client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        again = llm.client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert again.token_ids == first.token_ids
        assert again.usage.computed_tokens <= 4
        assert_nothing_held(llm.addresses.block_store)
