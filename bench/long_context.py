"""Serves one sequence of 262,144 tokens, and compares it with transformers (`python -m bench.long_context`).

The model has random weights and full attention (two layers, two heads of 32) in float32. Prefill and decode run in
separate processes. The whole prompt is sent once. Then prefixes of it that end at random positions are sent, and their
full blocks must be found in the cache. The token and the log-probability after each of these positions are compared
with those of one forward pass of transformers over the whole prompt. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import ModelConfig
from engine.tiny import make_checkpoint
from looseleaf import LLM
from testing.system import assert_nothing_held

BLOCK_SIZE = 16
NEW_TOKENS = 8
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 5e6,
}  # fmt: skip


def reference(model: Path, tokens: list[int], positions: list[int]) -> torch.Tensor:
    """Returns transformers' log-probabilities [positions, vocab] of the token after each position, in float64."""
    built = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    with torch.inference_mode():
        logits = built.eval()(torch.tensor([tokens]), use_cache=False, logits_to_keep=torch.tensor(positions)).logits[0]
    return logits.double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.long_context", description=__doc__)
    parser.add_argument("--tokens", type=int, default=262_144, help="length of the sequence, with its output")
    parser.add_argument("--samples", type=int, default=24, help="positions to compare")
    args = parser.parse_args()
    rng = random.Random(1)
    length = args.tokens - NEW_TOKENS
    tokens = [rng.randrange(5, 500) for _ in range(length)]
    ends = sorted({*rng.sample(range(1, length), args.samples - 1), length})
    with tempfile.TemporaryDirectory() as directory:
        model = make_checkpoint(directory, "llama", std=0.1, max_position_embeddings=args.tokens, **SHAPE)
        served = serve(model, tokens, ends, args.tokens)
        began = time.monotonic()
        expected = reference(model, tokens, [end - 1 for end in ends])
        served["transformers_s"] = round(time.monotonic() - began, 1)
    compare(served, ends, expected)
    print(json.dumps({"bench": "long_context", "tokens": args.tokens} | served))


def serve(model: Path, tokens: list[int], ends: list[int], max_len: int) -> dict[str, Any]:
    """Sends the prompt and its prefixes to a server. Returns the answers and their times."""
    layout, _ = ModelConfig.from_directory(model).kv_groups(BLOCK_SIZE, "float32")
    computed = -(-max_len // BLOCK_SIZE)
    settings: dict[str, Any] = {
        "dtype": "float32", "max_model_len": max_len, "block_size": BLOCK_SIZE, "num_blocks": 2 * computed + 64,
        "roles": "split",
    }  # fmt: skip
    with LLM(str(model), **settings) as llm:
        began = time.monotonic()
        how: dict[str, Any] = {"temperature": 0.0, "logprobs": 1, "ignore_eos": True, "timeout": 3000.0}
        [whole] = llm.generate([tokens], max_tokens=NEW_TOKENS, **how)
        first_s = time.monotonic() - began
        print(f"{len(tokens):,} tokens prefilled and {NEW_TOKENS} decoded in {first_s:.1f} s")
        kept = assert_nothing_held(llm.addresses.block_store).cached
        assert kept == (max_len - 1) // BLOCK_SIZE, f"{kept:,} blocks are cached"  # the last token has no KV
        began = time.monotonic()
        parts = [llm.generate([tokens[:end]], max_tokens=1, **how)[0] for end in ends]
    return {
        "blocks": computed, "cached_blocks": kept, "kv_bytes": computed * layout.block_bytes,
        "prefill_s": round(first_s, 1), "samples_s": round(time.monotonic() - began, 1),
        "cached": [part.usage.cached_tokens for part in parts],
        "answers": [(part.token_ids[0], part.samples[0].logprobs[0].logprob) for part in parts],
        "output": whole.token_ids,
    }  # fmt: skip


def compare(served: dict[str, Any], ends: list[int], expected: torch.Tensor) -> None:
    """Prints the largest difference of a log-probability, and adds it to `served`. Raises AssertionError if a token
    differs, or if the cached tokens of a prefix are not exactly the full blocks before its last token.
    """
    differences = []
    for end, cached, (token, logprob), row in zip(ends, served["cached"], served["answers"], expected, strict=True):
        assert token == int(row.argmax()), f"after {end:,} tokens: {token} instead of {int(row.argmax())}"
        assert cached == (end - 1) // BLOCK_SIZE * BLOCK_SIZE, f"{cached:,} of {end:,} tokens were cached"
        differences.append(abs(logprob - float(row[token])))
    served["largest_difference"] = max(differences)
    print(
        f"{len(ends)} positions: all tokens are those of transformers, log-probabilities within {max(differences):.1e}"
    )


if __name__ == "__main__":
    main()
