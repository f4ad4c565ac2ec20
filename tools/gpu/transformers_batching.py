"""Measures continuous batching in transformers, which has a paged cache, with the workload of `loadtest.throughput`.

    python tools/gpu/transformers_batching.py --model models/configs/llama-3.1-8b --requests 128

The model has the shape of `--model` and random weights. All requests are submitted at once, and the scheduler runs as
many as fit.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from testing.system import prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--attention", default="paged|sdpa", help="transformers' attn_implementation")
    options = parser.parse_args()
    logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(options.model)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=options.attention)
    model.eval()
    length = options.output_tokens
    settings = GenerationConfig(
        max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    lengths = (options.prompt_tokens, options.prompt_tokens)

    def run(seed: int, num: int) -> tuple[float, int]:
        inputs = prompts(num, seed=seed, lengths=lengths)
        started = time.perf_counter()
        done = model.generate_batch(inputs=inputs, generation_config=settings, progress_bar=False)
        return time.perf_counter() - started, sum(len(output.generated_tokens) for output in done.values())

    run(1, 4)
    seconds, num_tokens = run(2, options.requests)
    print(f"{num_tokens / seconds:10.1f} tok/s out (transformers, {options.attention}, {device})")
    print(json.dumps({
        "benchmark": "transformers_batching", **vars(options), "device": device, "seconds": round(seconds, 2),
        "num_tokens": num_tokens, "output_tok_s": round(num_tokens / seconds, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
