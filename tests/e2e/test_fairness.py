"""A tenant that floods the service, and another one that sends only a few requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.errors import ResourceExhausted
from looseleaf import LLM, AsyncClient
from testing.system import assert_nothing_held, prompts

STREAMS, TOKENS = 30, 1000


async def test_a_newcomer_is_answered_while_a_flood_at_its_best_priority_runs_and_nobodys_tokens_change(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Four sequences run at a time, so each request of the newcomer preempts a sequence of the flood."""
    keys = tmp_path / "keys"
    keys.write_text("flood flood-key best_priority=-9\nother other-key\n")
    kinds = prompts(STREAMS, seed=41, lengths=(5, 40))
    asked = {"temperature": 0.0, "ignore_eos": True}
    with LLM(
        str(checkpoint), num_blocks=4096, max_model_len=1200, max_num_seqs=4, max_queue=20, api_key_file=str(keys)
    ) as llm:
        async with (
            AsyncClient(llm.addresses.grpc, api_key="flood-key") as flood,
            AsyncClient(llm.addresses.grpc, api_key="other-key") as other,
        ):
            alone = await other.generate(kinds[0], max_tokens=TOKENS, **asked)  # type: ignore[arg-type]
            tasks = [
                asyncio.create_task(flood.generate(p, max_tokens=TOKENS, priority=-9, **asked))  # type: ignore[arg-type]
                for p in kinds
            ]
            await asyncio.sleep(0.3)
            answers = [await other.generate(kinds[0], max_tokens=8, **asked) for _ in range(4)]  # type: ignore[arg-type]
            running = sum(not task.done() for task in tasks)
            assert running >= 12, "answered before the flood was over: it did not wait for its turn"
            done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {answer.token_ids for answer in answers} == {alone.token_ids[:8]}
        assert isinstance(done[0], BaseException) or done[0].token_ids == alone.token_ids
        refused = [item for item in done if isinstance(item, BaseException)]
        assert len(refused) == STREAMS - 20 and all(isinstance(item, ResourceExhausted) for item in refused)
        assert_nothing_held(llm.addresses.block_store)
